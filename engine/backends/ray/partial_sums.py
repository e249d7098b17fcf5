"""A phase's sums on several nodes: added up where both neighbours are, and brought to the driver as late as can be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError

from ...reduction.tree import Leaves, PartialSum, TreeNode, TreeReducer, TreeShape, add_leaves
from .cluster_nodes import Site
from .locality import DRIVER


class Far(NamedTuple):
    """Sums on a node."""

    site: Site
    reference: Any


class Held:
    """`results`: of tasks and pieces on other nodes than the driver's; `crossed`, `bytes`: sums that came from there;
    since somebody asked."""

    def __init__(self) -> None:
        self.results = self.crossed = self.bytes = 0
        self.begin(TreeShape([1]))

    def begin(self, shape: TreeShape) -> None:
        """Of a new phase."""
        self.fold: TreeReducer[Far | Leaves] = TreeReducer(shape, self._add)

    @property
    def shape(self) -> TreeShape:
        return self.fold.shape

    def put(self, at: TreeNode, site: Site, leaves: Leaves | None, reference: Any) -> None:
        """leaves: None where they have stayed on the node."""
        self.results += site.number != DRIVER
        if leaves is not None:
            self._count(site, leaves)
            self.fold.put(at, leaves)
        elif site.number == DRIVER:
            self.fold.put(at, ray.get(reference))  # this node's memory
        else:
            self.fold.put(at, Far(site, reference))

    def _add(self, left: Far | Leaves, right: Far | Leaves) -> Far | Leaves | None:
        if isinstance(left, Far) and isinstance(right, Far) and left.site is right.site:
            return Far(left.site, left.site.keeper.add.remote(left.reference, right.reference))
        try:
            return add_leaves(self.brought(left), self.brought(right))
        except RayError:
            return None  # `missing` will find out

    def brought(self, sums: Far | Leaves) -> Leaves:
        if not isinstance(sums, Far):
            return sums
        leaves: Leaves = ray.get(sums.reference)
        self._count(sums.site, leaves)
        return leaves

    def _count(self, site: Site, leaves: Leaves) -> None:
        if site.number != DRIVER and leaves:
            self.crossed += 1
            self.bytes += sum(leaf.nbytes for leaf in leaves)

    def missing(self) -> list[TreeNode]:
        """Bring all; the places of those that cannot be brought."""
        gone = []
        for at, sums in self.fold.parts.items():
            try:
                self.fold.parts[at] = self.brought(sums)
            except RayError:
                gone.append(at)
        return gone

    def rest(self) -> Iterator[PartialSum]:
        """Once all are here."""
        for at, leaves in self.fold.parts.items():
            assert not isinstance(leaves, Far)
            yield PartialSum(at, leaves)
        self.fold.parts = {}

    def lose(self, site: Site) -> list[TreeNode]:
        """The places of what was on a node that is no more."""
        gone = [at for at, sums in self.fold.parts.items() if isinstance(sums, Far) and sums.site is site]
        self.drop(gone)
        return gone

    def drop(self, places: list[TreeNode]) -> None:
        for at in places:
            del self.fold.parts[at]

    def forget_task(self, index: int) -> None:
        """What came of a task's pieces: it is run whole instead."""
        self.drop([at for at in self.fold.parts if at.within(self.shape.task(index))])

    def facts(self) -> dict[str, float]:
        found = {"node/results": self.results, "node/sums": self.crossed, "node/bytes_sums": self.bytes}
        self.results = self.crossed = self.bytes = 0
        return {name: float(value) for name, value in found.items()}

"""The partition by the natural clients of a data set: the writers, roles or users in its column "client"."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from .. import counted
from ..client_index import ClientIndex
from ..workload import Partition
from .standard import gathered, in_random_order


def client_numbers(names: Sequence[str] | np.ndarray) -> np.ndarray:
    """(n,) int64: each row's client; clients are numbered in the alphabetical order of their names."""
    return np.unique(np.asarray(names), return_inverse=True)[1].astype(np.int64)


@dataclass(frozen=True)
class Natural(Partition):
    """Each client of the run is a natural client of the data set; if the set has more, they are drawn at random.

    Their order is drawn too: client 3 of the run is another natural client with each seed.

    `minimum`: natural clients with fewer rows are left out. `rest`: what happens to the natural clients that are not
    drawn. "drop" leaves their rows out, as Takakura et al. 2025 do (100 of 3,550 writers); "merge" gives each of them
    as a whole to a client of the run, so that every row is used.
    """

    minimum: int = 1
    rest: Literal["drop", "merge"] = "drop"

    column: ClassVar[str] = "client"

    def __post_init__(self) -> None:
        if self.minimum < 1:
            raise ValueError(f"minimum >= 1 must hold, got minimum={self.minimum}")
        if self.rest not in ("drop", "merge"):
            raise ValueError(f"rest must be drop or merge, got rest={self.rest!r}")

    def deal(self, labels: np.ndarray, clients: int, seed: int) -> ClientIndex:
        """labels: (n,) the natural client of each row."""
        random = counted.numpy_generator(seed, "partition", "natural")
        order = np.argsort(labels, kind="stable")
        starts = np.append(np.unique(labels[order], return_index=True)[1], len(order))
        large = np.diff(starts) >= self.minimum
        begins, sizes = starts[:-1][large], np.diff(starts)[large]  # of each natural client's rows in `order`
        if not 1 <= clients <= len(sizes):
            raise ValueError(
                f"1 <= clients <= number of natural clients with {self.minimum} rows or more must hold, got "
                f"clients={clients} and {len(sizes)} natural clients; lower federation.clients or choose another "
                "partition"
            )
        drawn = random.permutation(len(sizes))
        drawn = drawn[:clients] if self.rest == "drop" else drawn
        sizes = sizes[drawn]
        within = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        rows = order[np.repeat(begins[drawn], sizes) + within]
        owner = np.repeat(np.arange(len(drawn)) % clients, sizes)
        return in_random_order(gathered(rows, owner, clients), random)

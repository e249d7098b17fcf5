"""Sums in one order, whoever adds them up: that of a binary tree over a phase's tasks, and over each task's blocks.

Neighbours are added, two and two, then fours, and so on; what has no neighbour goes up as it is. The tree is cut by the
configuration alone. So a worker may add up its blocks, a node what its workers have, the driver the rest, and the bits
are the same wherever and whenever that is done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar

import numpy as np

T = TypeVar("T")
Leaves = list[np.ndarray]


class TaskResult(NamedTuple):
    """A task's result: float64 sums over its clients, or an evaluation's over its examples."""

    index: int
    leaves: Leaves | None  # None: they are where they were added up
    facts: dict[str, float]
    clients: dict[str, np.ndarray] = {}  # noqa: RUF012 never written to; a number a client, or an evaluation's a row
    dropped: tuple[int, ...] = ()

    @staticmethod
    def nothing(index: int, dropped: tuple[int, ...]) -> TaskResult:
        """Of a task all of whose clients were dropped."""
        return TaskResult(index, [], {}, {}, dropped)

    @staticmethod
    def join(parts: Sequence[TaskResult]) -> TaskResult:
        """Of a task that runs in parts only, one after the other."""
        first, *others = parts
        for other in others:
            first = add_results(first, other)
        return first


def add_results(left: TaskResult, right: TaskResult) -> TaskResult:
    """Those of the left one's number; clients in order."""
    leaves = None if left.leaves is None or right.leaves is None else add_leaves(left.leaves, right.leaves)
    facts, clients = dict(left.facts), dict(left.clients)
    for name, value in right.facts.items():
        facts[name] = facts[name] + value if name in facts else value
    for name, values in right.clients.items():
        clients[name] = np.concatenate([clients[name], values]) if name in clients else values
    return TaskResult(left.index, leaves, facts, clients, left.dropped + right.dropped)


def add_leaves(left: Leaves, right: Leaves) -> Leaves:
    """In the left one's memory if that is its own; either may be empty."""
    if not left or not right:
        return left or right
    pairs = zip(left, right, strict=True)
    return [np.add(a, b, out=a if a.flags.owndata and a.flags.writeable else None) for a, b in pairs]


class TreeNode(NamedTuple):
    """A place in the tree: (0, b) is block b, (level, place) what is above (level - 1, 2 place) and its neighbour."""

    level: int
    place: int

    def within(self, other: TreeNode) -> bool:
        up = other.level - self.level
        return up >= 0 and self.place >> up == other.place


class TreeShape:
    """Of the tree over tasks of so many blocks each; their roots are all on one level, `depth`."""

    def __init__(self, blocks: Sequence[int]) -> None:
        self.blocks = list(blocks)
        self.depth = max((count - 1).bit_length() for count in self.blocks)
        self.root = TreeNode(self.depth + (len(self.blocks) - 1).bit_length(), 0)

    def task(self, index: int) -> TreeNode:
        return TreeNode(self.depth, index)

    def inside(self, index: int, at: TreeNode) -> TreeNode:
        """The place in the whole tree of one in a task's own."""
        return TreeNode(at.level, (index << (self.depth - at.level)) + at.place)

    def above(self, at: TreeNode) -> Iterator[TreeNode]:
        """The places that it counts to, the nearest first."""
        while at != self.root:
            at = TreeNode(at.level + 1, at.place >> 1)
            yield at

    def empty(self, at: TreeNode) -> bool:
        """Whether no block is there."""
        if at.level >= self.depth:
            return at.place << (at.level - self.depth) >= len(self.blocks)
        task, place = divmod(at.place, 1 << (self.depth - at.level))
        return task >= len(self.blocks) or place << at.level >= self.blocks[task]


class TreeReducer(Generic[T]):
    """What there is of a tree's sums, added up as far as they go, in whatever order they come."""

    def __init__(self, shape: TreeShape, add: Callable[[T, T], T | None]) -> None:
        """add(left, right): None where these two cannot be added up here."""
        self.shape, self.add = shape, add
        self.parts: dict[TreeNode, T] = {}

    def put(self, at: TreeNode, value: T) -> None:
        while at != self.shape.root:
            beside = TreeNode(at.level, at.place ^ 1)
            if not self.shape.empty(beside):
                if beside not in self.parts:
                    break
                other = self.parts[beside]
                both = self.add(other, value) if at.place % 2 else self.add(value, other)
                if both is None:
                    break
                del self.parts[beside]
                value = both
            at = TreeNode(at.level + 1, at.place >> 1)
        self.parts[at] = value

    def whole(self) -> T:
        """Once all is there."""
        return self.parts[self.shape.root]


class PartialSum(NamedTuple):
    """Sums at a place in the tree."""

    at: TreeNode
    leaves: Leaves

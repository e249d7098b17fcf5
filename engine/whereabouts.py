"""Which nodes hold which rows, and who gets which task next. No Ray here: benchmarks/schedule.py drives it, too.

A row has one number everywhere, and each node's files have room for all of them (they are sparse). So a row that moves
is copied to the same place in another node's file, and the driver's table, the hosts and the checkpoints know nothing
of nodes. A row's home is wherever a copy is: on the node that wrote it, and on those that it was copied to since.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from .host import Work
from .pieces import Piece, place_of
from .sums import At, Shape

AHEAD = 2
"""Calls that a host has at a time while there are many tasks: it need not wait for the driver in between."""
MOST_NODES = 256
SEVERAL = -1
DRIVER = 0
"""The driver's node; its files are those of the run, that checkpoints name."""


class Whereabouts:
    def __init__(self, rows: int) -> None:
        """Every row is the driver's node's until another has written it."""
        self.copies = np.zeros((MOST_NODES, rows), dtype=bool)
        self.nodes = 0

    def add(self) -> int:
        """A node's number."""
        if self.nodes >= MOST_NODES:
            raise ValueError(f"at most {MOST_NODES} nodes can come and go in a run")
        self.nodes += 1
        self.copies[self.nodes - 1] = self.nodes - 1 == DRIVER
        return self.nodes - 1

    def held(self, rows: np.ndarray) -> np.ndarray:
        """(nodes,): how many of these rows each node has."""
        return self.copies[: self.nodes, rows].sum(1)

    def wrote(self, node: int, rows: np.ndarray) -> None:
        self.copies[: self.nodes, rows] = False
        self.copies[node, rows] = True

    def copied(self, node: int, rows: np.ndarray) -> None:
        self.copies[node, rows] = True

    def lose(self, node: int) -> None:
        self.copies[node] = False

    def gone(self, rows: np.ndarray) -> np.ndarray:
        """Those that no node has."""
        return rows[~self.copies[: self.nodes, rows].any(0)]

    def missing(self, node: int, rows: np.ndarray) -> list[tuple[int, np.ndarray]]:
        """[(a node that has them, rows), …] of those that this node does not have."""
        rows = rows[~self.copies[node, rows]]
        source = self.copies[: self.nodes, rows].argmax(0)
        return [(int(other), rows[source == other]) for other in np.unique(source)]


class Waiting(NamedTuple):
    task: Any
    held: np.ndarray  # (nodes,) of the rows it reads
    at: At


def reads(task: Any) -> np.ndarray:
    """The rows that a task needs where it runs; evaluations need none."""
    return task.read[task.read >= 0] if isinstance(task, Work | Piece) else np.zeros(0, dtype=np.int64)


class Desk:
    """Hands out tasks, the longest first, as they were put. Among the next few, a node gets the one that spares the
    most bytes: rows that it has, and sums of neighbours that it can add up by itself. So blocks go home first, and
    where a node is behind, others take its blocks, rows and all."""

    def __init__(self, where: Whereabouts) -> None:
        self.where = where
        self.waiting: list[Waiting] = []
        self.begin(Shape([1]), 0, 0)

    def begin(self, shape: Shape, row_bytes: int, sum_bytes: int) -> None:
        """Of a new phase."""
        self.shape, self.row_bytes, self.sum_bytes = shape, row_bytes, sum_bytes
        self.given: dict[At, int] = {}  # the node that all tasks below it went to, so far; SEVERAL

    def __len__(self) -> int:
        return len(self.waiting)

    def put(self, task: Any) -> None:
        self.waiting.append(Waiting(task, self.where.held(reads(task)), place_of(task, self.shape)))

    def take(self, node: int, among: int) -> Any:
        """For a host on a node that is free; among: the next so many."""
        best = max(range(min(among, len(self.waiting))), key=lambda i: (self._spared(self.waiting[i], node), -i))
        task, _, at = self.waiting.pop(best)
        for above in self.shape.above(at):
            self.given[above] = node if self.given.get(above, node) == node else SEVERAL
        return task

    def _spared(self, waiting: Waiting, node: int) -> float:
        """Bytes. A neighbour's sums count whole, those of the neighbour of both a half, and so on; where they are
        another node's, they are what it would lose."""
        held = int(waiting.held[node]) if node < len(waiting.held) else 0  # the node came later
        up, whose = next(
            ((up, self.given[above]) for up, above in enumerate(self.shape.above(waiting.at)) if above in self.given),
            (0, SEVERAL),
        )
        share = 0.0 if whose == SEVERAL else 0.5**up if whose == node else -(0.5**up)
        return held * self.row_bytes + share * self.sum_bytes

    def hand_out(self, seats: Sequence[Any], give: Callable[[Any, Any], None]) -> None:
        """seats: hosts with a `node` and `calls`, what they have been given and not returned; give(seat, task)."""
        for depth in range(AHEAD):
            for seat in seats:
                if len(seat.calls) == depth and len(self) > (len(seats) if depth else 0):
                    give(seat, self.take(seat.node, len(seats)))

    def forget(self) -> None:
        self.waiting.clear()

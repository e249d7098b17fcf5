"""Which nodes hold which rows, and who gets which task next. No Ray here: benchmarks/schedule.py drives it, too.

A row has one number everywhere, and each node's files have room for all of them (they are sparse). So a row that moves
is copied to the same place in another node's file, and the driver's table, the workers and the checkpoints know nothing
of nodes. A row's home is wherever a copy is: on the node that wrote it, and on those that it was copied to since.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from ...cohorts.tasks import TrainingTask
from ...reduction.tree import TreeNode, TreeShape
from .task_splitting import Piece, key, place_of

AHEAD = 2
"""Calls that a worker has at a time while there are many tasks: it need not wait for the driver in between."""
ALIKE = 0.9
"""Share of the longest task's steps from which on another may go before it: one that waits is late at the end."""
SMALL = 1 / 8
"""Share of a worker's work in a phase: with so much left to do it is given its next task, and need not wait for it."""
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
    above: tuple[TreeNode, ...]
    steps: int


def reads(task: Any) -> np.ndarray:
    """The rows that a task needs where it runs; evaluations need none."""
    return task.read[task.read >= 0] if isinstance(task, TrainingTask | Piece) else np.zeros(0, dtype=np.int64)


def steps_in(task: Any, steps: np.ndarray | None) -> int:
    """Of a task; 1 where that is not known."""
    work = task.work if isinstance(task, Piece) else task
    return int(steps[work.task.clients].sum()) if steps is not None and isinstance(work, TrainingTask) else 1


class Desk:
    """Hands out tasks, the longest first, as they were put. Among the next few that are nearly as long, a node gets the
    one that spares the most bytes: rows that it has, and sums of neighbours that it can add up by itself. So blocks go
    home first, and where a node is behind, others take its blocks, rows and all. The quickest workers choose first;
    slower ones take nothing that would keep the others waiting at the end."""

    def __init__(self, where: Whereabouts, steps: np.ndarray | None = None) -> None:
        """steps: (N,) of each client."""
        self.where, self.steps = where, steps
        self.waiting: list[Waiting] = []
        self.left = 0  # steps that wait
        self.begin(TreeShape([1]), 0, 0)

    def begin(self, shape: TreeShape, row_bytes: int, sum_bytes: int) -> None:
        """Of a new phase."""
        self.shape, self.row_bytes, self.sum_bytes = shape, row_bytes, sum_bytes
        self.sizes: dict[tuple[int, int], int] = {}  # steps of what was put
        self.all = 0  # their sum
        self.given: dict[TreeNode, int] = {}  # the node that all tasks below it went to, so far; SEVERAL

    def __len__(self) -> int:
        return len(self.waiting)

    def put(self, task: Any) -> None:
        steps = steps_in(task, self.steps)
        at = place_of(task, self.shape)
        self.waiting.append(Waiting(task, self.where.held(reads(task)), tuple(self.shape.above(at)), steps))
        self.sizes[key(task)] = steps
        self.all += steps
        self.left += steps

    def take(self, node: int, among: int, most: float = np.inf) -> Any:
        """For a worker on a node that is free; among: the next so many, of those nearly as long as the longest; most:
        steps that it may have. None: none has."""
        few = list(islice((i for i, each in enumerate(self.waiting) if each.steps <= most), among))
        if not few:
            return None
        few = [i for i in few if self.waiting[i].steps >= ALIKE * self.waiting[few[0]].steps]
        best = max(few, key=lambda i: (self._spared(self.waiting[i], node), -i))
        taken = self.waiting.pop(best)
        self.left -= taken.steps
        for above in taken.above:
            self.given[above] = node if self.given.get(above, node) == node else SEVERAL
        return taken.task

    def _spared(self, waiting: Waiting, node: int) -> float:
        """Bytes. A neighbour's sums count whole, those of the neighbour of both a half, and so on; where they are
        another node's, they are what it would lose."""
        held = int(waiting.held[node]) if self.row_bytes and node < len(waiting.held) else 0  # the node came later
        share = 0.0
        if self.sum_bytes:
            for up, above in enumerate(waiting.above):
                if (whose := self.given.get(above)) is not None:
                    share = 0.0 if whose == SEVERAL else 0.5**up if whose == node else -(0.5**up)
                    break
        return held * self.row_bytes + share * self.sum_bytes

    def hand_out(self, seats: Sequence[Any], give: Callable[[Any, Any], None]) -> None:
        """seats: workers with a `node`, a `speed` and `calls`, what they have been given and not returned;
        give(seat, task)."""
        ordered = sorted(seats, key=lambda seat: -seat.speed)
        if not ordered:
            return
        quickest, slower = ordered[0].speed, ordered[-1].speed < ordered[0].speed
        small = SMALL * self.all / sum(seat.speed for seat in seats)
        fair = self._left(seats) if slower else np.inf
        for depth in range(AHEAD):
            for seat in ordered:
                given = self._given(seat)
                if len(seat.calls) == depth and given <= small * seat.speed and len(self) > depth * len(seats):
                    most = np.inf if seat.speed >= quickest else fair * seat.speed - given
                    task = self.take(seat.node, len(seats), most)
                    if task is not None:
                        give(seat, task)

    def _left(self, seats: Sequence[Any]) -> float:
        """Until the phase would end, if all workers ended together: steps over speed."""
        left = self.left + sum(map(self._given, seats))
        return left / sum(seat.speed for seat in seats)

    def _given(self, seat: Any) -> int:
        """Steps that it has been given."""
        return sum(self.sizes.get(key(call.task), 1) for call in seat.calls)

    def forget(self) -> None:
        self.waiting.clear()
        self.left = 0

"""Which node gets which task next. This module knows nothing of Ray: benchmarks/schedule.py drives it, too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, NamedTuple, Protocol

import numpy as np

from ...cohorts.tasks import TrainingTask
from ...reduction.tree import TreeNode, TreeShape
from .row_locations import RowLocations

AHEAD = 2
"""Tasks that a node has for each of its workers while there are many: workers need not wait for the driver."""
ALIKE = 0.9
"""Share of the longest task's steps from which on another may go before it: a long task that waits ends late."""
SMALL = 1 / 4
"""Share of a worker's steps in a phase: with so few left to do, it is given its next task before it asks."""
SEVERAL = -1
"""In place of a node's number: tasks below a branch of the tree have gone to several nodes."""

Key = tuple[int, TreeNode | None]


class Waiting(NamedTuple):
    task: Any
    held: np.ndarray  # (nodes,) how many of the rows that it reads each node has
    above: tuple[TreeNode, ...]
    steps: int


class Taker(Protocol):
    """Workers of one group on one node. node: its number. workers: how many. speed: steps a second of one worker.
    given: the tasks that they have been given and not finished."""

    @property
    def node(self) -> int: ...
    @property
    def workers(self) -> int: ...
    @property
    def speed(self) -> float: ...
    @property
    def given(self) -> dict[Key, Any]: ...


def key_of(task: Any) -> Key:
    """Tells a task, a branch of a task, or the result of either from all others of a phase."""
    return (task.index, task.branch)


def rows_read(task: Any) -> np.ndarray:
    """The rows that a task needs on its node; evaluations need none."""
    return task.read[task.read >= 0] if isinstance(task, TrainingTask) else np.zeros(0, dtype=np.int64)


def steps_in(task: Any, steps: np.ndarray | None) -> int:
    """Local steps of a task; 1 where that is not known. steps: (N,) of each client."""
    return int(steps[task.clients].sum()) if steps is not None and isinstance(task, TrainingTask) else 1


class Scheduler:
    """Hands out tasks, the longest first, in the order in which they were put.

    Among the next few tasks of nearly the same length, a node gets the one that spares the most bytes: rows that it
    has, and sums of neighbours that it can add. So blocks return to where their clients' states are, and where a node
    is behind, others take its blocks, states included. The quickest workers choose first; slower ones take nothing that
    would keep the others waiting at the end of the phase.
    """

    def __init__(self, locations: RowLocations, steps: np.ndarray | None = None) -> None:
        """steps: (N,) local steps of each client in a round."""
        self.locations, self.steps = locations, steps
        self.waiting: list[Waiting] = []
        self.begin(TreeShape([1]), 0, 0)

    def begin(self, shape: TreeShape, row_bytes: int, sum_bytes: int) -> None:
        """Begin a phase. shape: of its tree. row_bytes: of one client's state. sum_bytes: of one task's sums."""
        self.shape, self.row_bytes, self.sum_bytes = shape, row_bytes, sum_bytes
        self.waiting.clear()
        self.steps_waiting = 0
        self.steps_all = 0  # of all tasks that were put
        self.sizes: dict[Key, int] = {}  # steps of each task that was put
        self.taken: dict[TreeNode, int] = {}  # the node that all tasks below it went to so far, or SEVERAL

    def __len__(self) -> int:
        """Tasks that wait."""
        return len(self.waiting)

    def put(self, task: Any) -> None:
        steps = steps_in(task, self.steps)
        above = tuple(self.shape.above(self.shape.node_of(task)))
        self.waiting.append(Waiting(task, self.locations.held(rows_read(task)), above, steps))
        self.sizes[key_of(task)] = steps
        self.steps_all += steps
        self.steps_waiting += steps

    def take(self, node: int, among: int, most: float = np.inf) -> Any:
        """The next task for a node, or None.

        among: the choice is among the next so many tasks that are nearly as long as the longest. most: steps that the
        task may have.
        """
        few = list(islice((i for i, each in enumerate(self.waiting) if each.steps <= most), among))
        if not few:
            return None
        few = [i for i in few if self.waiting[i].steps >= ALIKE * self.waiting[few[0]].steps]
        best = max(few, key=lambda i: (self._bytes_spared(self.waiting[i], node), -i))
        chosen = self.waiting.pop(best)
        self.steps_waiting -= chosen.steps
        for above in chosen.above:
            self.taken[above] = node if self.taken.get(above, node) == node else SEVERAL
        return chosen.task

    def _bytes_spared(self, waiting: Waiting, node: int) -> float:
        """A neighbour's sums count whole, those of the neighbour of both a half, and so on; sums on another node count
        as lost."""
        held = int(waiting.held[node]) if self.row_bytes and node < len(waiting.held) else 0  # the node came later
        share = 0.0
        if self.sum_bytes:
            for up, above in enumerate(waiting.above):
                if (whose := self.taken.get(above)) is not None:
                    share = 0.0 if whose == SEVERAL else 0.5**up if whose == node else -(0.5**up)
                    break
        return held * self.row_bytes + share * self.sum_bytes

    def hand_out(self, takers: Sequence[Taker], give: Callable[[Any, Any], None]) -> None:
        """Call give(taker, task) for each task that should start now or soon; `give` adds it to what the taker has."""
        ordered = sorted(takers, key=lambda taker: -taker.speed)
        if not ordered:
            return
        workers = sum(taker.workers for taker in takers)
        quickest, unequal = ordered[0].speed, ordered[-1].speed < ordered[0].speed
        speed = sum(taker.speed * taker.workers for taker in takers)
        small = SMALL * self.steps_all / speed
        fair = (self.steps_waiting + sum(map(self._steps_given, takers))) / speed if unequal else np.inf
        for depth in range(AHEAD):
            for taker in ordered:
                while len(taker.given) < (depth + 1) * taker.workers and len(self) > depth * workers:
                    given = self._steps_given(taker) / taker.workers
                    if depth and given > small * taker.speed:
                        break
                    most = np.inf if taker.speed >= quickest else fair * taker.speed - given
                    task = self.take(taker.node, workers, most)
                    if task is None:
                        break
                    give(taker, task)

    def _steps_given(self, taker: Taker) -> int:
        return sum(self.sizes.get(key, 1) for key in taker.given)

    def forget(self) -> None:
        """Drop the tasks that wait."""
        self.waiting.clear()
        self.steps_waiting = 0

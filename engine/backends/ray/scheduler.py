"""Which node gets which task next. This module knows nothing of Ray: benchmarks/schedule.py drives it, too."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, NamedTuple, Protocol

import numpy as np

from ...cohorts.tasks import TrainingTask
from ...reduction.tree import TreeNode, TreeShape
from .row_locations import RowLocations

AHEAD = 1
"""The number of tasks per worker that a node has while there are many tasks, so that workers do not wait for the
driver."""
ALIKE = 0.9
"""A task may go before the longest one only if it has at least this share of its steps, because a long task that starts
late ends late. The limit does not apply while the longest task is less than SMALL of the waiting work per worker."""
SMALL = 1 / 4
"""If a worker has less than this share of its steps of the phase left, it gets its next task before it asks."""
PORTION = 3 / 4
"""The share of its fair part of the waiting steps that a node gets at once. Portions shrink towards the end of a phase,
so that few messages are needed and nodes still end together."""
LEAST = 1 / 10
"""The smallest share of its part of the whole phase that a node gets at once."""
SEVERAL = -1
"""In place of a node's number: tasks below a branch of the tree have gone to several nodes."""

Key = tuple[int, TreeNode | None]


class Waiting(NamedTuple):
    task: Any
    held: np.ndarray  # (nodes,) how many of the rows that it reads each node has
    above: tuple[TreeNode, ...]
    steps: int


class Taker(Protocol):
    """The workers of one group on one node. node: the number of the node. workers: their number. speed: the steps per
    second of one worker. given: the tasks that they have and have not finished."""

    @property
    def node(self) -> int: ...
    @property
    def workers(self) -> int: ...
    @property
    def speed(self) -> float: ...
    @property
    def given(self) -> dict[Key, Any]: ...


def key_of(task: Any) -> Key:
    """A key that identifies a task, a branch of a task, or the result of either within a phase."""
    return (task.index, task.branch)


def rows_read(task: Any) -> np.ndarray:
    """The rows that a task needs on its node; evaluations need none."""
    return task.read[task.read >= 0] if isinstance(task, TrainingTask) else np.zeros(0, dtype=np.int64)


def steps_in(task: Any, steps: np.ndarray | None) -> int:
    """The local steps of a task, 1 if they are not known. steps: (N,) of each client."""
    return int(steps[task.clients].sum()) if steps is not None and isinstance(task, TrainingTask) else 1


class Pace(NamedTuple):
    """The speed of the workers of all takers together. workers: their number. quickest: the largest speed of a worker.
    steps_a_second: the steps per second of all of them. all: the seconds that all tasks of the phase take. fair: the
    seconds from now until all tasks are done if no worker waits; infinite if all workers have the same speed.
    """

    workers: int
    quickest: float
    steps_a_second: float
    all: float
    fair: float

    @staticmethod
    def of(ordered: Sequence[Taker], steps: int, waiting: int, given: Callable[[Taker], int]) -> Pace:
        """ordered: the takers, the fastest first. steps: the steps of all tasks of the phase. waiting: the steps of the
        tasks that wait. given: returns the steps of the tasks that a taker has."""
        speed = sum(taker.speed * taker.workers for taker in ordered)
        unequal = ordered[-1].speed < ordered[0].speed
        fair = (waiting + sum(map(given, ordered))) / speed if unequal else np.inf
        return Pace(sum(taker.workers for taker in ordered), ordered[0].speed, speed, steps / speed, fair)


class Scheduler:
    """Hands out tasks, the longest first, in the order in which they were put.

    Among the next few tasks of nearly the same length, a node gets the task that saves the most bytes: rows that the
    node has, and sums of neighbours that it can add. So blocks return to the nodes that have their clients' states, and
    if a node is late, other nodes take its blocks with their states. Each node begins at its own place of the tree and
    goes on from there, so that most of its sums are neighbours. The fastest workers choose first; slower ones take no
    task for which the others would have to wait at the end of the phase.
    """

    def __init__(self, locations: RowLocations, steps: np.ndarray | None = None) -> None:
        """steps: (N,) local steps of each client in a round."""
        self.locations, self.steps = locations, steps
        self.waiting: OrderedDict[Key, Waiting] = OrderedDict()
        self.begin(TreeShape([1]), 0, 0)

    def begin(self, shape: TreeShape, row_bytes: int, sum_bytes: int) -> None:
        """Begin a phase. shape: of its tree. row_bytes: of one client's state. sum_bytes: of one task's sums."""
        self.shape, self.row_bytes, self.sum_bytes = shape, row_bytes, sum_bytes
        self.waiting.clear()
        self.steps_waiting = 0
        self.steps_all = 0  # of all tasks that were put
        self.sizes: dict[Key, int] = {}  # steps of each task that was put
        self.taken: dict[TreeNode, int] = {}  # the node that all tasks below it went to so far, or SEVERAL
        self.first_block: dict[Key, int] = {}  # of each task that was put: the first block of the tree below it
        self.order: list[Key] = []  # all tasks that were put, in the order of the tree
        self.stretch: dict[int, tuple[int, int]] = {}  # node -> (first, end) of its last run of neighbours in `order`

    def __len__(self) -> int:
        """The number of tasks that wait."""
        return len(self.waiting)

    def put(self, task: Any) -> None:
        key, at, steps = key_of(task), self.shape.node_of(task), steps_in(task, self.steps)
        above = tuple(self.shape.above(at))
        self.waiting[key] = Waiting(task, self.locations.held(rows_read(task)), above, steps)
        self.first_block[key] = at.place << at.level
        self.order.clear()
        self.sizes[key] = steps
        self.steps_all += steps
        self.steps_waiting += steps

    def take(self, node: int, among: int, most: float = np.inf) -> Any:
        """The next task for a node, or None.

        among: the number of tasks to choose from; these are the next ones that are nearly as long as the longest, and
        the neighbours of the task that the node got last. most: the largest number of steps of the task.
        """
        fitting = (item for item in self.waiting.items() if item[1].steps <= most)
        few = list(islice(fitting, among))
        if not few:
            return None
        longest = few[0][1].steps
        least = ALIKE * longest if longest * among > SMALL * self.steps_waiting else 0
        few = [item for item in few if item[1].steps >= least]
        few += [(key, self.waiting[key]) for key in self._beside(node) if least <= self.waiting[key].steps <= most]
        key, chosen = max(few, key=lambda item: self._bytes_spared(item[1], node))  # the first of equals
        del self.waiting[key]
        self.steps_waiting -= chosen.steps
        self._extend(node, key)
        for above in chosen.above:
            self.taken[above] = node if self.taken.get(above, node) == node else SEVERAL
        return chosen.task

    def _beside(self, node: int) -> list[Key]:
        """The waiting tasks right after and right before the one that a node got last."""
        if not self.order:
            self._sort()
        first, end = self.stretch.get(node, (0, len(self.order)))
        keys = [self.order[place] for place in (end, first - 1) if 0 <= place < len(self.order)]
        return [key for key in keys if key in self.waiting]

    def _sort(self) -> None:
        self.order = sorted(self.first_block, key=self.first_block.__getitem__)
        self.places = {key: place for place, key in enumerate(self.order)}
        self.stretch.clear()

    def _extend(self, node: int, key: Key) -> None:
        """Note that a node was given a task."""
        place = self.places[key]
        first, end = self.stretch.get(node, (place, place))
        self.stretch[node] = (first, end + 1) if place == end else (place, end if place == first - 1 else place + 1)

    def _bytes_spared(self, waiting: Waiting, node: int) -> float:
        """The bytes that are saved if a node gets a task. The sums of a neighbour count fully, those of the neighbour
        of both count a half, and so on; sums on another node count as lost."""
        held = int(waiting.held[node]) if self.row_bytes and node < len(waiting.held) else 0  # else it joined later
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
        if not self.stretch:
            self._spread(ordered)
        pace = Pace.of(ordered, self.steps_all, self.steps_waiting, self._steps_given)
        short = [taker for taker in ordered if len(taker.given) <= AHEAD * taker.workers]
        for depth in range(AHEAD):
            for taker in ordered:
                while len(taker.given) < (depth + 1) * taker.workers and len(self) > depth * pace.workers:
                    load = self._steps_given(taker) / taker.workers
                    if depth and load > SMALL * pace.all * taker.speed:
                        break
                    if not self._give_one(taker, pace, load, give):
                        break
        self._give_portions(short, pace, give)

    def _spread(self, takers: Sequence[Taker]) -> None:
        """Choose the place of the tree at which each node begins. The distances between these places are proportional
        to the nodes' numbers of workers."""
        self._sort()
        workers = dict.fromkeys((taker.node for taker in takers), 0)
        for taker in takers:
            workers[taker.node] += taker.workers
        before, whole = 0, sum(workers.values())
        for node, count in workers.items():
            place = before * len(self.order) // whole
            self.stretch[node] = place, place
            before += count

    def _give_portions(self, takers: Sequence[Taker], pace: Pace, give: Callable[[Any, Any], None]) -> None:
        """Give the takers that have at most AHEAD tasks per worker a portion of the waiting tasks, one task each in
        turn."""
        seconds = max(PORTION * self.steps_waiting / pace.steps_a_second, LEAST * pace.all)
        loads = [(taker, self._steps_given(taker) / taker.workers) for taker in takers]
        while loads:
            loads = [
                (taker, load + steps / taker.workers)
                for taker, load in loads
                if load < seconds * taker.speed and (steps := self._give_one(taker, pace, load, give))
            ]

    def _give_one(self, taker: Taker, pace: Pace, load: float, give: Callable[[Any, Any], None]) -> int:
        """Give a taker its next task. Returns its steps, 0 if there is none. load: steps that each worker has."""
        most = np.inf if taker.speed >= pace.quickest else pace.fair * taker.speed - load
        task = self.take(taker.node, pace.workers, most)
        if task is None:
            return 0
        give(taker, task)
        return self.sizes[key_of(task)]

    def _steps_given(self, taker: Taker) -> int:
        return sum(self.sizes.get(key, 1) for key in taker.given)

    def forget(self) -> None:
        """Drop the tasks that wait."""
        self.waiting.clear()
        self.steps_waiting = 0

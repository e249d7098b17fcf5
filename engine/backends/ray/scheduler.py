"""Which tasks a worker runs next. This module knows nothing of Ray."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...clients.own_models import OwnModels
from ...cohorts.tasks import TrainingTask
from ...reduction.tree import TreeNode
from .row_locations import RowLocations

CALL_SECONDS = 0.05
"""A call has so many tasks that they take about these seconds: a call costs some milliseconds of a processor."""
IN_FLIGHT = 2
"""The number of calls that a worker has, so that it does not wait for the driver."""
ALIKE = 0.9
"""A task may be taken before the longest one only if it has at least this share of its steps, because a long task that
starts late ends late."""

Key = tuple[int, TreeNode | None]


class Waiting(NamedTuple):
    """A task that waits for a worker.

    alone: it runs in a call of its own, as a task does that failed, or whose call had no reply: if the worker dies, the
    task is to blame. for_states: it has run, and the driver has its outcome, but the node with the new states of its
    clients is lost. It runs once more for these states, and what becomes of it is not told to the driver.
    """

    task: Any
    steps: int
    alone: bool = False
    for_states: bool = False


class Pace(NamedTuple):
    """All workers: their number, the speed of the fastest and of all together in steps per second, and the steps that
    they have and have not finished. The speed is 0 while none was measured."""

    workers: int
    fastest: float
    together: float
    given: int


def key_of(task: Any) -> Key:
    """A key that identifies a task, a branch of a task, or the result of either within a phase."""
    return (task.index, task.branch)


def rows_read(task: Any) -> np.ndarray:
    """The rows that a task needs on its node; evaluations of the server's model need none."""
    reads = isinstance(task, TrainingTask | OwnModels)
    return task.read[task.read >= 0] if reads else np.zeros(0, dtype=np.int64)


class Scheduler:
    """The tasks that wait, the longest first, which is also the order of the tree.

    Among the next few tasks of nearly the same length, a node gets the one most of whose rows it has. So blocks return
    to the nodes that have their clients' states, and if a node is late, other nodes take its blocks with their states.
    """

    def __init__(self, locations: RowLocations, steps: np.ndarray) -> None:
        """steps: (N,) local steps of each client in a round."""
        self.locations, self.steps = locations, steps
        self.waiting: list[Waiting] = []
        self.steps_waiting = self.steps_all = 0

    def __len__(self) -> int:
        return len(self.waiting)

    def put(self, task: Any, alone: bool = False, for_states: bool = False) -> None:
        """Let a task wait, behind the others."""
        steps = int(self.steps[task.clients].sum()) if isinstance(task, TrainingTask) else 1
        self.steps_all += steps
        self.put_back([Waiting(task, steps, alone, for_states)], first=False)

    def put_back(self, items: Sequence[Waiting], first: bool = True) -> None:
        """Let these tasks wait again, before the others."""
        self.waiting = [*items, *self.waiting] if first else [*self.waiting, *items]
        self.steps_waiting += sum(item.steps for item in items)

    def take(self, node: int, speed: float, load: int, pace: Pace, further: bool = False) -> list[Waiting]:
        """The tasks of the next call of a worker: one, and its neighbours as long as all together take less than
        CALL_SECONDS and less than a fair part of the phase. Empty if there is none, or if the others would have to
        wait for this worker at the end of the phase.

        speed, load: of the worker, steps per second and the steps that it has. further: whether further tasks may come.
        """
        most = np.inf
        if speed < pace.fastest:
            most = (self.steps_waiting + pace.given) / pace.together * speed - load
        place = self._first(node, pace.workers, most)
        if place is None:
            return []
        part = np.inf if further else self.steps_all / (IN_FLIGHT * pace.workers)
        steps = min(CALL_SECONDS * speed, part)
        end, total = place + 1, self.waiting[place].steps
        if not self.waiting[place].alone:
            while end < len(self.waiting) and total < steps and not self.waiting[end].alone:
                total += self.waiting[end].steps
                end += 1
        taken = self.waiting[place:end]
        del self.waiting[place:end]
        self.steps_waiting -= total
        return taken

    def _first(self, node: int, among: int, most: float) -> int | None:
        """The place of the task with which a call begins."""
        few: list[int] = []
        for place in self._fitting(most):
            if len(few) == among or (few and self.waiting[place].steps < ALIKE * self.waiting[few[0]].steps):
                break
            few.append(place)
        if len(few) < 2 or self.locations.nodes < 2:
            return few[0] if few else None
        return max(few, key=lambda place: self.locations.held(rows_read(self.waiting[place].task))[node])

    def _fitting(self, most: float) -> Iterator[int]:
        return (place for place, item in enumerate(self.waiting) if item.steps <= most)

    def clear(self) -> None:
        self.waiting, self.steps_waiting, self.steps_all = [], 0, 0

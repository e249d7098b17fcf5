"""Tasks: how a cohort is cut into blocks and tasks, and what a worker is told of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ..config.schema import Local

FEWEST, MOST = 20, 128
"""Tasks a round, where there are blocks enough: a task costs a message as long as the model, whatever it holds."""


class ClientTask(NamedTuple):
    """Consecutive blocks: `clients` in order, cut after every position in `cuts`."""

    index: int
    clients: np.ndarray  # (c,) int64
    cuts: tuple[int, ...]  # ends of blocks, the last is c


def steps_of(sizes: np.ndarray, local: Local) -> np.ndarray:
    """(c,) local steps of clients with so many examples."""
    if local.epochs is None:
        return np.full(len(sizes), local.steps, dtype=np.int64)
    return local.epochs * -(-sizes // local.batch)


def plan_tasks(clients: np.ndarray, sizes: np.ndarray, local: Local, block: int) -> list[ClientTask]:
    """Blocks of equal size, but for one client more or less; the longest first, so that no worker is left with one at
    the end and clients of like length share a block."""
    steps = steps_of(sizes, local)
    ordered = clients[np.lexsort((clients, -steps))]
    blocks = np.array_split(ordered, -(-len(ordered) // block))
    edges = task_edges(len(blocks))
    tasks = []
    for index, (begin, end) in enumerate(pairwise(edges)):
        members = blocks[begin:end]
        cuts = np.cumsum([len(member) for member in members])
        tasks.append(ClientTask(index, np.concatenate(members), tuple(int(cut) for cut in cuts)))
    return tasks


def task_edges(blocks: int) -> list[int]:
    """Where tasks begin among so many blocks: a block each if they are few, else a quarter of the tasks with half of
    the blocks, a quarter with half of the rest, and so on, so that workers that pull them finish together."""
    count = min(max(FEWEST, blocks // 8), MOST)
    if blocks <= count:
        return list(range(blocks + 1))
    shares = np.cumsum(np.repeat([8, 4, 2, 1], count // 4))
    return sorted({0, *np.rint(shares / shares[-1] * blocks).astype(int).tolist()})


class TrainingTask(NamedTuple):
    """A task with what the driver knows of its clients, each (c,)."""

    task: ClientTask
    round: int
    warm_start: bool
    visits: np.ndarray
    weights: np.ndarray  # of delta; sum to the cohort's size
    read: np.ndarray  # rows of the store, -1 for a first visit
    write: np.ndarray

    @staticmethod
    def of(
        task: ClientTask, when: tuple[int, bool], sampled: np.ndarray, columns: tuple[np.ndarray, ...]
    ) -> TrainingTask:
        """when: (round, opening); columns: visits, weights, read, write, each (S,), of `sampled`, ascending."""
        at = np.searchsorted(sampled, task.clients)
        return TrainingTask(task, *when, *(column[at] for column in columns))

    @property
    def index(self) -> int:
        return self.task.index

    @property
    def what(self) -> str:
        """For a log."""
        return f"round {self.round}, task {self.index}, clients {', '.join(map(str, self.task.clients))}"

    def part(self, places: np.ndarray) -> TrainingTask:
        """The same with some of its clients only, cut where they were."""
        cuts = sorted({int((places < cut).sum()) for cut in self.task.cuts} - {0})
        task = ClientTask(self.index, self.task.clients[places], tuple(cuts))
        columns = (self.visits[places], self.weights[places], self.read[places], self.write[places])
        return TrainingTask(task, self.round, self.warm_start, *columns)


@dataclass(frozen=True)
class PackedTasks:
    """Tasks of one phase with the columns of all end to end: pickle takes a fifth of the time of so many arrays."""

    tasks: list[tuple[int, tuple[int, ...]]]  # (index, cuts)
    when: tuple[int, bool]  # (round, opening)
    columns: tuple[np.ndarray, ...]  # clients, visits, weights, read, write; (clients of all tasks,) each

    @staticmethod
    def of(works: Sequence[TrainingTask]) -> PackedTasks:
        tasks = [(work.index, work.task.cuts) for work in works]
        columns = zip(*((w.task.clients, w.visits, w.weights, w.read, w.write) for w in works), strict=True)
        return PackedTasks(tasks, (works[0].round, works[0].warm_start), tuple(map(np.concatenate, columns)))

    def __getitem__(self, place: int) -> TrainingTask:
        index, cuts = self.tasks[place]
        begin = sum(before[-1] for _, before in self.tasks[:place])
        clients, *columns = (column[begin : begin + cuts[-1]] for column in self.columns)
        return TrainingTask(ClientTask(index, clients, cuts), *self.when, *columns)


class Broadcast(NamedTuple):
    """What all tasks of a phase read: the leaves of the public state, or of the model."""

    version: int
    leaves: list[np.ndarray]

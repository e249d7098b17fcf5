"""Tasks cut finer, where there are more workers than tasks for them.

Tasks are cut by the configuration, never by workers, and a task's blocks are added up in the order of a tree (`sums`):
that is why the bits do not depend on workers. So a branch of that tree may run anywhere by itself. It costs a message
as long as the model for each piece instead of each task, and is done where workers would be idle otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from ...cohorts.tasks import TrainingTask
from ...reduction.tree import TaskResult, TreeNode, TreeReducer, TreeShape, add_results
from ..base import Failure

FINE = 16
"""A task with more than 1/FINE of a worker's share of the phase is cut into pieces of about so much."""


class Piece(NamedTuple):
    """A branch of a task's tree, `at`: `work` is what is to be done, `number` of `count`."""

    task: TrainingTask
    work: TrainingTask
    at: TreeNode
    number: int
    count: int

    @property
    def index(self) -> int:
        return self.task.index

    @property
    def read(self) -> np.ndarray:
        return self.work.read

    @property
    def write(self) -> np.ndarray:
        return self.work.write


def whole_blocks(work: TrainingTask) -> list[TrainingTask]:
    return [work.subset(np.arange(begin, end)) for begin, end in pairwise((0, *work.task.cuts))]


def key(task: Any) -> tuple[int, int]:
    """Of a task or a piece of one."""
    return (task.index, task.number if isinstance(task, Piece) else 0)


def place_of(task: Any, shape: TreeShape) -> TreeNode:
    """In the phase's tree."""
    return shape.inside(task.index, task.at) if isinstance(task, Piece) else shape.task(task.index)


def cut(tasks: Sequence[Any], workers: int, steps: np.ndarray) -> list[Any]:
    """The tasks of a phase, those in pieces that are large for so many workers. steps: (N,) of each client."""
    if not all(isinstance(task, TrainingTask) for task in tasks):
        return list(tasks)
    weights = [int(steps[task.task.clients].sum()) for task in tasks]
    share = sum(weights) / max(1, workers)
    found: list[Any] = []
    for task, weight in zip(tasks, weights, strict=True):
        found += [task] if weight * FINE <= share else pieces(task, steps, share / FINE)
    return found


def pieces(task: TrainingTask, steps: np.ndarray, most: float) -> list[Any]:
    """Branches of `most` steps at most, but for single blocks."""
    cuts = (0, *task.task.cuts)
    blocks = len(cuts) - 1
    done = np.concatenate([[0], np.cumsum(steps[task.task.clients])])

    def branches(at: TreeNode) -> list[TreeNode]:
        begin, end = blocks_of(at, blocks)
        if begin >= end:
            return []
        if end - begin == 1 or done[cuts[end]] - done[cuts[begin]] <= most:
            return [at]
        return branches(TreeNode(at.level - 1, 2 * at.place)) + branches(TreeNode(at.level - 1, 2 * at.place + 1))

    found = branches(TreeShape([blocks]).root)
    if len(found) == 1:
        return [task]
    edges = [[cuts[edge] for edge in blocks_of(at, blocks)] for at in found]
    parts = [task.subset(np.arange(begin, end)) for begin, end in edges]
    return [Piece(task, part, at, i, len(found)) for i, (part, at) in enumerate(zip(parts, found, strict=True))]


def blocks_of(at: TreeNode, blocks: int) -> tuple[int, int]:
    """(first, end) of those below."""
    return at.place << at.level, min((at.place + 1) << at.level, blocks)


class Joiner:
    """Puts a task's results together again."""

    def __init__(self) -> None:
        self.folds: dict[int, TreeReducer[TaskResult]] = {}
        self.failed: set[int] = set()  # tasks that are run whole instead: what else comes of their pieces is late

    def add(self, piece: Piece, result: TaskResult | Failure) -> tuple[TrainingTask, TaskResult | Failure] | None:
        """(the task, its result) once that is known; a piece that fails is the task's failure."""
        if piece.index in self.failed:
            return None
        if isinstance(result, Failure):
            self.failed.add(piece.index)
            return piece.task, result
        shape = TreeShape([len(piece.task.task.cuts)])
        fold = self.folds.setdefault(piece.index, TreeReducer(shape, add_results))
        fold.put(piece.at, result)
        if shape.root not in fold.parts:
            return None
        del self.folds[piece.index]
        return piece.task, fold.total()

    def clear(self) -> None:
        self.folds.clear()
        self.failed.clear()

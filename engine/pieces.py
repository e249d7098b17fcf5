"""Tasks cut finer than their sums, where there are more hosts than tasks for them.

Tasks are cut by the configuration, never by hosts, and a task's sums are added block by block: that is why the bits do
not depend on hosts. So a piece of a task, some of its blocks, may run anywhere, if it sends the sums of each block by
themselves and the driver adds them in the blocks' order. (Only the first piece can add up its own.) It costs a message
as long as the model for each block instead of each task, and is done where hosts would be idle otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from .fleet import Failure
from .host import Sums, Work

FINE = 16
"""A task with more than 1/FINE of a host's share of the phase is cut into pieces of about so much."""


class Piece(NamedTuple):
    """Some consecutive blocks of a task: `work` is what is to be done, `number` of `count`."""

    task: Work
    work: Work
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

    def blocks(self) -> list[Work]:
        """One by one, but for the first piece, whose blocks are added up where they are run."""
        return [self.work] if self.number == 0 else whole_blocks(self.work)


def whole_blocks(work: Work) -> list[Work]:
    return [work.part(np.arange(begin, end)) for begin, end in pairwise((0, *work.task.cuts))]


def key(task: Any) -> tuple[int, int]:
    """Of a task or a piece of one."""
    return (task.index, task.number if isinstance(task, Piece) else 0)


def cut(tasks: Sequence[Any], hosts: int, steps: np.ndarray) -> list[Any]:
    """The tasks of a phase, those in pieces that are large for so many hosts. steps: (N,) of each client."""
    if not all(isinstance(task, Work) for task in tasks):
        return list(tasks)
    weights = [int(steps[task.task.clients].sum()) for task in tasks]
    share = sum(weights) / max(1, hosts)
    found: list[Any] = []
    for task, weight in zip(tasks, weights, strict=True):
        found += [task] if weight * FINE <= share else pieces(task, steps, share / FINE)
    return found


def pieces(task: Work, steps: np.ndarray, most: float) -> list[Any]:
    """most: steps of a piece of several blocks."""
    cuts = (0, *task.task.cuts)
    done = np.concatenate([[0], np.cumsum(steps[task.task.clients])])
    edges = [0]
    for before, at in pairwise(cuts):
        if done[at] - done[edges[-1]] > most and before > edges[-1]:
            edges.append(before)
    edges.append(cuts[-1])
    parts = [task.part(np.arange(begin, end)) for begin, end in pairwise(edges)]
    return [Piece(task, part, number, len(parts)) for number, part in enumerate(parts)] if len(parts) > 1 else [task]


class Joiner:
    """Puts a task's results together again."""

    def __init__(self) -> None:
        self.parts: dict[int, dict[int, list[Sums]]] = {}
        self.failed: set[int] = set()  # tasks that are run whole instead: what else comes of their pieces is late

    def add(self, piece: Piece, result: list[Sums] | Failure) -> tuple[Work, Sums | Failure] | None:
        """(the task, its result) once that is known; a piece that fails is the task's failure."""
        if piece.index in self.failed:
            return None
        if isinstance(result, Failure):
            self.failed.add(piece.index)
            return piece.task, result
        mine = self.parts.setdefault(piece.index, {})
        mine[piece.number] = result
        if len(mine) < piece.count:
            return None
        ordered = [sums for number in range(piece.count) for sums in mine[number]]
        del self.parts[piece.index]
        return piece.task, Sums.join(ordered)

    def clear(self) -> None:
        self.parts.clear()
        self.failed.clear()

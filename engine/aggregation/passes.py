"""The passes over the rows of a round's messages. A pass consists of tasks, each of which goes through some pieces.

The result of a task depends only on the rows and the pieces, and the pieces follow from the configuration. Parts of a
Gram matrix are added in the order of a tree over the tasks. So the bits do not depend on the number of workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from ...algorithms.aggregation.contract import Aggregator
from ...algorithms.attacks.contract import Columns, Plan
from ..reduction.tree import TaskResult, TreeNode, TreeReducer, TreeShape
from .message_rows import MessageRows
from .sorting import sort_columns
from .vectors import Piece


class Forged(NamedTuple):
    """What a pass of an attack writes for one vector. plan: the plan of the attack. rows: the rows in the files. key:
    the key of its random numbers. first: whether the attack has no state yet."""

    plan: Plan
    rows: np.ndarray
    key: torch.Tensor
    first: bool = False


class RowsOf(NamedTuple):
    """The rows of one vector that a pass reads.

    rows: (S,) in the files. weights: (S,) for a weighted sum. matrix: (S', S), by which the rows are combined before
    their columns are read, or None. f, scale: for the rule's columns. mean: (S,), the weights of a mean with which
    the answer is compared, or None. places: the coordinates of the vector that are read, in ascending order.
    forged: what a pass of an attack writes. plain: (S,) for a weighted sum, the weights of pieces that are plain; None
    for the same as `weights`. statistics: (S,) the weights of running statistics, in a weighted sum as in a pass over
    columns; they are none of them negative, and their sum is 1 at most, so that no variance or count can become
    negative. None: those of the vector, or the rule's columns within the range of the rows.
    """

    rows: np.ndarray
    weights: np.ndarray | None = None
    matrix: np.ndarray | None = None
    f: int = 0
    scale: float = 1.0
    mean: np.ndarray | None = None
    places: np.ndarray | None = None
    forged: Forged | None = None
    plain: np.ndarray | None = None
    statistics: np.ndarray | None = None

    def weights_of(self, piece: Piece) -> np.ndarray | None:
        """(S,): the weights of the rows in the weighted sum of one piece. None for the rule's columns."""
        if piece.statistic and self.statistics is not None:
            return self.statistics
        return self.plain if piece.plain and self.plain is not None else self.weights

    def values(self, x: np.ndarray) -> np.ndarray:
        """(S', C): the rows after what stands before the rule. x: (S, C), as they are stored."""
        return x if self.matrix is None else np.stack([weighted_sum(weights, x) for weights in self.matrix])


class Parts(NamedTuple):
    """The parts of the stage that passes call."""

    rule: Aggregator
    attack: Any


class PassTask(NamedTuple):
    """A task of a pass. what: the kind of pass. vectors: for each vector what is read, the same for all tasks of a
    pass. lengths: P of each vector."""

    index: int
    what: str
    pieces: tuple[Piece, ...]
    vectors: tuple[RowsOf | None, ...]
    round: int
    lengths: tuple[int, ...] = ()
    branch: None = None

    @property
    def memory_remedy(self) -> str:
        """The remedy if memory is too small for the task."""
        return "lower federation.cohort or engine.workers"

    @property
    def description(self) -> str:
        """The task in words, for log lines."""
        return f"round {self.round}, {self.what} of the messages, task {self.index}"

    @property
    def numbers(self) -> list[int]:
        """The numbers of the vectors that the task's pieces belong to, in order."""
        return list(dict.fromkeys(piece.vector for piece in self.pieces))

    def run(self, files: MessageRows, stage: Parts) -> TaskResult:
        """The task's result: `leaves` has what `what` says."""
        return TaskResult(self.index, PASSES[self.what](self, files, stage), {})


def gram(task: PassTask, files: MessageRows, stage: Parts) -> list[np.ndarray]:
    """For each vector of the task its part of the Gram matrix, (S, S)."""
    found: dict[int, torch.Tensor] = {}
    for piece in task.pieces:
        of = task.vectors[piece.vector]
        assert of is not None
        part = inner_products(torch.from_numpy(files.read_double(of.rows, piece.span)))
        found[piece.vector] = found[piece.vector] + part if piece.vector in found else part
    return [np.triu(part.numpy()) + np.triu(part.numpy(), 1).T for part in found.values()]


def inner_products(x: torch.Tensor) -> torch.Tensor:
    """(S, S): the inner products of the rows of x; the lower triangle is not computed throughout.

    The rows are cut in two, which saves a quarter of the products.
    """
    half = len(x) // 2
    if half < 8:
        return x @ x.T
    found = x.new_zeros(len(x), len(x))
    found[:half] = x[:half] @ x.T
    found[half:, half:] = x[half:] @ x[half:].T
    return found


class Answer(NamedTuple):
    """What a pass gives for one piece. values: (C,) float64. mean: (C,), what the answer is compared with, or None."""

    values: np.ndarray
    mean: np.ndarray | None


def weighted_sums(task: PassTask, files: MessageRows, stage: Parts) -> list[np.ndarray]:
    """The weighted sums of the rows, in the form of `answers`."""

    return answers(task, partial(weighted_answer, files))


def weighted_answer(files: MessageRows, of: RowsOf, piece: Piece) -> Answer:
    """The weighted sum of the rows in one piece, and the mean with which it is compared if it is."""
    found = of.weights_of(piece)
    assert found is not None
    weights = found[None] if of.mean is None or piece.follows else np.stack([found, of.mean])
    used = np.flatnonzero(weights.any(axis=0))
    sums = sums_of_rows(weights[:, used], files.each_row(of.rows[used], piece.span), piece.span.length)
    return Answer(sums[0], sums[1] if len(sums) > 1 else None)


def columns(task: PassTask, files: MessageRows, stage: Parts) -> list[np.ndarray]:
    """The rule's answers for sorted columns, in the form of `answers`."""

    def answer(of: RowsOf, piece: Piece) -> Answer:
        if of.weights_of(piece) is not None:
            return weighted_answer(files, of, piece)
        x = files.read(of.rows, piece.span)
        mean = None if of.mean is None or piece.follows else weighted_sum(of.mean, x)
        ordered = sort_columns(of.values(x))
        values = stage.rule.columns(ordered, of.f) * of.scale
        return Answer(np.clip(values, ordered[0], ordered[-1]) if piece.statistic else values, mean)

    return answers(task, answer)


def answers(task: PassTask, answer: Callable[[RowsOf, Piece], Answer]) -> list[np.ndarray]:
    """For each piece the answer, (C,) float64; then (V, 2): for each vector of the task |answer - mean|^2 and |mean|^2
    over the pieces that decide. answer: of a piece."""
    found = []
    apart = {number: np.zeros(2) for number in task.numbers}
    for piece in task.pieces:
        of = task.vectors[piece.vector]
        assert of is not None
        values, mean = answer(of, piece)
        found.append(values)
        if mean is not None:
            apart[piece.vector] += [np.square(values - mean).sum(), np.square(mean).sum()]
    return [*found, np.stack(list(apart.values()))]


def weighted_sum(weights: np.ndarray, x: np.ndarray) -> np.ndarray:
    """(C,) float64: see `sums_of_rows`. weights: (S,). x: (S, C)."""
    return sums_of_rows(weights[None], x, x.shape[1])[0]


def sums_of_rows(weights: np.ndarray, rows: Iterable[np.ndarray], length: int) -> np.ndarray:
    """(k, C) float64: k sums of S rows with weights (k, S); rows with weight 0 are left out. length: C.

    Products are rounded before they are added, row after row, so that the bits do not depend on the number of columns.
    """
    totals = np.zeros((len(weights), length))
    product = np.empty(length)
    for each, row in zip(weights.T.tolist(), rows, strict=True):
        for total, weight in zip(totals, each, strict=True):
            if weight:
                np.multiply(row, weight, out=product)
                total += product
    return totals


def in_piece(places: np.ndarray, piece: Piece) -> np.ndarray:
    """Which of these coordinates of a vector lie in a piece, counted from its first one. places: in ascending order."""
    begin, end = np.searchsorted(places, [piece.first, piece.first + piece.span.length])
    return places[begin:end] - piece.first


def values(task: PassTask, files: MessageRows, stage: Parts) -> list[np.ndarray]:
    """For each piece: (S', n) float64, the rows at those places that lie in it."""
    found = []
    for piece in task.pieces:
        of = task.vectors[piece.vector]
        assert of is not None
        assert of.places is not None
        found.append(of.values(files.read(of.rows, piece.span)[:, in_piece(of.places, piece)]).astype(np.float64))
    return found


def signs(task: PassTask, files: MessageRows, stage: Parts) -> list[np.ndarray]:
    """For each piece: (S', 3) float64, how many of the rows' values at its places are positive, zero and negative."""
    counts = []
    for x in values(task, files, stage):
        sums = [(x > 0).sum(axis=1), (x == 0).sum(axis=1), (x < 0).sum(axis=1)]
        counts.append(np.stack(sums, axis=1).astype(np.float64))
    return counts


def direction(task: PassTask, files: MessageRows, stage: Parts) -> list[np.ndarray]:
    """Write the direction of an attack. For each piece: (1,) the squared norm of what was written."""
    return written(task, files, lambda columns, forged: stage.attack.direction(columns, forged.first))


def forged_rows(task: PassTask, files: MessageRows, stage: Parts) -> list[np.ndarray]:
    """Write what Byzantine clients send. For each piece the squared norms, (1,) if all send the same, else (B,)."""

    def forge(columns: Columns, forged: Forged) -> np.ndarray:
        if forged.plan.copies is not None:
            return columns.x[forged.plan.copies]
        return stage.attack.forge(columns, forged.plan, len(forged.rows))

    return written(task, files, forge)


def written(task: PassTask, files: MessageRows, forge: Callable[[Columns, Forged], np.ndarray]) -> list[np.ndarray]:
    """Write for each piece what `forge` returns, (C,) or (rows, C). Returns the squared norms of the rows."""
    found = []
    for piece in task.pieces:
        of = task.vectors[piece.vector]
        assert of is not None
        assert of.forged is not None
        x = files.read_double(of.rows, piece.span)
        mean = np.add.reduce(x, axis=0) / len(x)
        squares = np.add.reduce(np.square(x - mean), axis=0)
        deviation = np.sqrt(squares / (len(x) - 1)) if len(x) > 1 else np.zeros_like(mean)
        columns = Columns(x, piece.first, task.lengths[piece.vector], mean, deviation, of.forged.key)
        rows = np.atleast_2d(forge(columns, of.forged))
        for row, values in zip(of.forged.rows.tolist(), rows, strict=False):
            files.write_span(row, piece.span, values)
        stored = rows.astype(files.numpy_dtypes[piece.span.leaf]).astype(np.float64)
        found.append(np.square(stored).sum(axis=1))
    return found


PASSES: dict[str, Any] = {
    "Gram matrix": gram,
    "weighted sum": weighted_sums,
    "columns": columns,
    "values": values,
    "signs": signs,
    "direction": direction,
    "forged rows": forged_rows,
}


def add_grams(tasks: Sequence[PassTask], results: Iterable[TaskResult]) -> dict[int, np.ndarray]:
    """For each vector its Gram matrix, from the parts that the tasks give, in the order of a tree over the tasks."""
    members: dict[int, list[int]] = {}
    for task in tasks:
        for number in task.numbers:
            members.setdefault(number, []).append(task.index)
    reducers = {
        number: TreeReducer[np.ndarray](TreeShape([1] * len(indices)), np.add) for number, indices in members.items()
    }
    for result in results:
        for number, part in zip(tasks[result.index].numbers, result.leaves or [], strict=True):
            reducers[number].put(TreeNode(0, members[number].index(result.index)), np.array(part))
    return {number: reducer.total() for number, reducer in reducers.items()}

"""The passes over the rows of a round's messages: what workers compute of them, and how the driver asks for it.

A pass consists of tasks, each of which goes through some pieces of the vectors. What a worker computes of a piece is a
function of this module, such as `gram`; its arguments for one vector are given by `partial`. The result of a task
depends only on the rows and the pieces, and the pieces follow from the configuration. Parts of a Gram matrix are added
in the order of a tree over the tasks. So the bits do not depend on the number of workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...algorithms.aggregation.contract import Stage
from ...algorithms.aggregation.messages import Stored
from ...algorithms.attacks.contract import Columns, Plan
from ..errors import MethodFailed
from ..reduction.tree import TaskResult, TreeNode, TreeReducer, TreeShape
from .message_rows import MessageRows
from .sorting import sort_columns
from .vectors import Piece, Vector, in_tasks, pieces_of

Work = Callable[[MessageRows, Stage, Piece], np.ndarray]
"""What a worker computes of one piece of a vector."""


class PassTask(NamedTuple):
    """A task of a pass. what: the pass, in words. work: number of a vector -> what is computed of its pieces. adds:
    whether the results of the pieces of a vector are added, otherwise each piece has a result of its own."""

    index: int
    what: str
    pieces: tuple[Piece, ...]
    work: Mapping[int, Work]
    round: int
    adds: bool = False
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

    def run(self, files: MessageRows, stage: Stage) -> TaskResult:
        """The task's result: `leaves` has an array for each piece, or for each of `numbers` if it adds."""
        if not self.adds:
            return TaskResult(self.index, [self.work[piece.vector](files, stage, piece) for piece in self.pieces], {})
        sums: dict[int, np.ndarray] = {}
        for piece in self.pieces:
            part = self.work[piece.vector](files, stage, piece)
            sums[piece.vector] = sums[piece.vector] + part if piece.vector in sums else part
        return TaskResult(self.index, list(sums.values()), {})


# --- what workers compute of a piece ----------------------------------------------------------------------------------
def gram(files: MessageRows, stage: Stage, piece: Piece, rows: np.ndarray) -> np.ndarray:
    """(S, S): the part of the Gram matrix, symmetric to the bit."""
    part = inner_products(torch.from_numpy(files.read_double(rows, piece.span))).numpy()
    return np.triu(part) + np.triu(part, 1).T


def inner_products(x: Tensor) -> Tensor:
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


def weighted(
    files: MessageRows, stage: Stage, piece: Piece, rows: np.ndarray, weights: np.ndarray,
    plain: np.ndarray | None = None, statistics: np.ndarray | None = None, mean: np.ndarray | None = None,
) -> np.ndarray:  # fmt: skip
    """The sum of the rows with `weights`, (S,), in the form of `compared`.

    plain: the weights in plain pieces, None for the same. statistics: the weights of running statistics; none of them
    is negative, and their sum is 1 at most, so that no variance or count can become negative. mean: the weights of the
    mean with which the sum is compared, or None.
    """
    if piece.statistic and statistics is not None:
        weights = statistics
    elif piece.plain and plain is not None:
        weights = plain
    both = weights[None] if mean is None or piece.follows else np.stack([weights, mean])
    used = np.flatnonzero(both.any(axis=0))
    sums = sums_of_rows(both[:, used], files.each_row(rows[used], piece.span), piece.span.length)
    return compared(sums[0], sums[1] if len(sums) > 1 else None)


def columns(
    files: MessageRows, stage: Stage, piece: Piece, rows: np.ndarray, matrix: np.ndarray | None, f: int, scale: float,
    statistics: np.ndarray | None = None, mean: np.ndarray | None = None,
) -> np.ndarray:  # fmt: skip
    """The rule's answer for sorted columns of `matrix` times the rows, times `scale`, in the form of `compared`.

    statistics: as in `weighted`; None for the rule's answer within the range of the rows. mean: as in `weighted`.
    """
    if piece.statistic and statistics is not None:
        return weighted(files, stage, piece, rows, statistics)
    x = files.read(rows, piece.span)
    honest = None if mean is None or piece.follows else weighted_sum(mean, x)
    ordered = sort_columns(combined(matrix, x))
    answer = stage.rule.columns(ordered, f) * scale
    return compared(np.clip(answer, ordered[0], ordered[-1]) if piece.statistic else answer, honest)


def compared(answer: np.ndarray, mean: np.ndarray | None) -> np.ndarray:
    """(C + 2,): the answer for C coordinates, |answer - mean|^2 and |mean|^2; these are 0 where there is no mean."""
    apart = (0.0, 0.0) if mean is None else (np.square(answer - mean).sum(), np.square(mean).sum())
    return np.append(answer, apart)


def combined(matrix: np.ndarray | None, x: np.ndarray) -> np.ndarray:
    """(S', C): `matrix` times the rows of x, (S, C), or x itself."""
    return x if matrix is None else np.stack([weighted_sum(weights, x) for weights in matrix])


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


def values(
    files: MessageRows, stage: Stage, piece: Piece, rows: np.ndarray, matrix: np.ndarray | None, places: np.ndarray
) -> np.ndarray:
    """(S', n) float64: `matrix` times the rows, at those places that lie in the piece."""
    return combined(matrix, files.read(rows, piece.span)[:, in_piece(places, piece)]).astype(np.float64)


def signs(
    files: MessageRows, stage: Stage, piece: Piece, rows: np.ndarray, matrix: np.ndarray | None, places: np.ndarray
) -> np.ndarray:
    """(S', 3) float64: how many of these values are positive, zero and negative."""
    x = values(files, stage, piece, rows, matrix, places)
    return np.stack([(x > 0).sum(axis=1), (x == 0).sum(axis=1), (x < 0).sum(axis=1)], axis=1).astype(np.float64)


def direction(
    files: MessageRows, stage: Stage, piece: Piece, rows: np.ndarray, to: np.ndarray, length: int, key: Tensor,
    first: bool,
) -> np.ndarray:  # fmt: skip
    """Write the direction of the attack, and return its squared norm, (1,)."""
    return written(files, piece, to, stage.attack.direction(known(files, piece, rows, length, key), first))


def forged(
    files: MessageRows, stage: Stage, piece: Piece, rows: np.ndarray, to: np.ndarray, length: int, key: Tensor,
    plan: Plan,
) -> np.ndarray:  # fmt: skip
    """Write what Byzantine clients send by a plan of the attack, and return the squared norms, (1,) if all of them send
    the same, else (B,)."""
    x = known(files, piece, rows, length, key)
    return written(
        files, piece, to, x.x[plan.copies] if plan.copies is not None else stage.attack.forge(x, plan, len(to))
    )


def known(files: MessageRows, piece: Piece, rows: np.ndarray, length: int, key: Tensor) -> Columns:
    """A piece of the rows that the attacker knows. length: P. key: of its random numbers for this vector."""
    x = files.read_double(rows, piece.span)
    mean = np.add.reduce(x, axis=0) / len(x)
    squares = np.add.reduce(np.square(x - mean), axis=0)
    deviation = np.sqrt(squares / (len(x) - 1)) if len(x) > 1 else np.zeros_like(mean)
    return Columns(x, piece.first, length, mean, deviation, key)


def written(files: MessageRows, piece: Piece, to: np.ndarray, vectors: np.ndarray) -> np.ndarray:
    """Write (C,), or (B, C), into the rows `to`. Returns the squared norms of what was written."""
    vectors = np.atleast_2d(vectors)
    for row, each in zip(to.tolist(), vectors, strict=False):
        files.write_span(row, piece.span, each)
    stored = vectors.astype(files.numpy_dtypes[piece.span.leaf]).astype(np.float64)
    return np.square(stored).sum(axis=1)


# --- how the driver asks for it ---------------------------------------------------------------------------------------
RunPass = Callable[[Sequence[PassTask]], Iterable[TaskResult]]
"""Has the workers run the tasks of a pass, and returns their results in any order."""


class Passes:
    """Some rows of one round's messages, for each vector of a list. What is read of them is read by the workers."""

    def __init__(self, run_pass: RunPass, vectors: Sequence[Vector], rows: Sequence[np.ndarray], round: int) -> None:
        """rows: of each vector, (S,), in the files."""
        self.run_pass, self.vectors, self.rows, self.round = run_pass, vectors, rows, round
        self.known_grams: dict[int, np.ndarray] | None = None

    def tasks(
        self, what: str, work: Mapping[int, Work], pieces: Iterable[Piece] | None = None, adds: bool = False
    ) -> list[PassTask]:
        """pieces: those to go through, of vectors that have work; None for all that decide."""
        pieces = pieces_of(self.vectors, False) if pieces is None else pieces
        parts = in_tasks([piece for piece in pieces if piece.vector in work])
        return [PassTask(index, what, part, work, self.round, adds) for index, part in enumerate(parts)]

    def results(self, tasks: Sequence[PassTask]) -> list[tuple[Piece, np.ndarray]]:
        """The results of all pieces of a pass, in their order."""
        found = {result.index: [np.array(part) for part in result.leaves or []] for result in self.run_pass(tasks)}
        return [item for task in tasks for item in zip(task.pieces, found[task.index], strict=True)]

    def grams(self) -> dict[int, np.ndarray]:
        """number of a vector -> its Gram matrix. The first call has all of them computed."""
        if self.known_grams is None:
            self.known_grams = self._grams()
        return self.known_grams

    def _grams(self) -> dict[int, np.ndarray]:
        """From the parts of the tasks, in the order of a tree over the tasks."""
        work = {number: partial(gram, rows=rows) for number, rows in enumerate(self.rows)}
        tasks = self.tasks("Gram matrix", work, adds=True)
        members: dict[int, list[int]] = {}
        for task in tasks:
            for number in task.numbers:
                members.setdefault(number, []).append(task.index)
        reducers = {
            number: TreeReducer[np.ndarray](TreeShape([1] * len(indices)), np.add)
            for number, indices in members.items()
        }
        for result in self.run_pass(tasks):
            for number, part in zip(tasks[result.index].numbers, result.leaves or [], strict=True):
                reducers[number].put(TreeNode(0, members[number].index(result.index)), np.array(part))
        return {number: reducer.total() for number, reducer in reducers.items()}

    def at(self, what: str, number: int, work: Work, places: np.ndarray) -> list[np.ndarray]:
        """What a pass gives for those pieces of a vector that have one of these coordinates, in order."""
        pieces = [piece for piece in pieces_of(self.vectors, False) if len(in_piece(places, piece))]
        return [part for _, part in self.results(self.tasks(what, {number: work}, pieces))]

    def answers(self, what: str, work: Mapping[int, Work], flat: list[np.ndarray] | None) -> dict[int, np.ndarray]:
        """Compute answers, in the form of `compared`. Returns for each vector |F - mean|^2 and |mean|^2, (2,). flat:
        the leaves into which the answers are written, or None."""
        tasks = self.tasks(what, work, None if flat is None else pieces_of(self.vectors, True))
        apart: dict[int, dict[int, np.ndarray]] = {}
        for result in self.run_pass(tasks):
            for piece, part in zip(tasks[result.index].pieces, result.leaves or [], strict=True):
                if flat is not None:
                    flat[piece.span.leaf][piece.span.begin : piece.span.end] = part[:-2]
                sums = apart.setdefault(piece.vector, {}).setdefault(result.index, np.zeros(2))
                sums += part[-2:]
        return {number: sum((by[i] for i in sorted(by)), np.zeros(2)) for number, by in apart.items()}


@dataclass(frozen=True, eq=False, kw_only=True)
class StoredRows(Stored):
    """Messages that lie in rows of files. passes: the rows of all vectors. number: of the vector. extra: the number of
    rows behind those of the messages that are shown. most_places: the most coordinates that results have room for."""

    passes: Passes
    number: int
    extra: int = 0
    most_places: int = 0

    @property
    def rows(self) -> np.ndarray:
        """(S,): the rows of the messages."""
        return self.passes.rows[self.number][: len(self.norms2)]

    @property
    def has_gram(self) -> bool:
        return self.passes.known_grams is not None

    def gram(self) -> np.ndarray:
        shown = len(self.norms2) + self.extra
        return self.passes.grams()[self.number][:shown, :shown]

    def of_rows(self, matrix: np.ndarray | None) -> np.ndarray | None:
        """(S', n): the weights of `rows` in combinations of the messages, or None for the rows themselves."""
        return matrix

    def values(self, places: np.ndarray, matrix: np.ndarray | None) -> np.ndarray:
        if len(places) > self.most_places:
            raise MethodFailed(
                f"round {self.passes.round}: a part of the stage looks at {len(places):,} coordinates at once, got "
                f"most_places={self.most_places:,}; have Aggregator.most_places return as many"
            )
        work = partial(values, rows=self.rows, matrix=self.of_rows(matrix), places=places)
        return np.concatenate(self.passes.at("values", self.number, work, places), axis=1)

    def signs(self, places: np.ndarray, matrix: np.ndarray | None) -> np.ndarray:
        work = partial(signs, rows=self.rows, matrix=self.of_rows(matrix), places=places)
        return np.sum(self.passes.at("signs", self.number, work, places), axis=0)

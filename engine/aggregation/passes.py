"""What workers compute of the rows of a round's messages, and the tasks in which they do it.

A pass over the rows consists of tasks, each of which goes through some pieces of the vectors. What a worker computes of
a piece is a function of this module, such as `gram`; its arguments for one vector are given by `partial`. The result of
a task depends only on the rows and the pieces, and the pieces follow from the configuration, so that the bits do not
depend on the number of workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...algorithms.aggregation.contract import Stage
from ...algorithms.attacks.contract import Columns
from ..reduction.tree import TaskResult
from .message_rows import MessageFiles, Span, Vector

PIECE = 8192
"""The number of coordinates in a piece of a vector. It is part of the definition of a Gram matrix: sums over other
pieces have other last bits."""
MOST_TASKS = 64
"""The largest number of tasks in one pass over the rows."""
SORTED_AT_ONCE = 4096
"""Columns that are sorted together, so that their rows stay in the second-level cache."""


class Piece(NamedTuple):
    """Up to PIECE consecutive numbers of a vector.

    vector: its number. first: their first place in the vector. follows: whether they only follow the vector. uniform:
    whether their leaf is in `Vector.uniform`. statistic: whether they are in `Vector.statistics`.
    """

    vector: int
    span: Span
    first: int
    follows: bool = False
    uniform: bool = False
    statistic: bool = False


def pieces_of(vectors: Sequence[Vector], also_following: bool) -> list[Piece]:
    """All pieces of the vectors, in order. also_following: also those that take no part in finding weights."""
    found: list[Piece] = []
    for number, vector in enumerate(vectors):
        groups = (vector.spans, vector.follows, vector.statistics) if also_following else (vector.spans,)
        for group, spans in enumerate(groups):
            first = 0
            for span in spans:
                for begin in range(span.begin, span.end, PIECE):
                    part = Span(span.leaf, begin, min(begin + PIECE, span.end))
                    uniform, statistic = span.leaf in vector.uniform, group == 2
                    found.append(Piece(number, part, first, group > 0, uniform, statistic))
                    first += part.length
    return found


def in_tasks(pieces: Sequence[Piece]) -> list[tuple[Piece, ...]]:
    """The pieces of each task: consecutive ones, of about the same number of coordinates in each task."""
    if not pieces:
        return []
    ends = np.cumsum([piece.span.length for piece in pieces])
    share = max(PIECE, -(-int(ends[-1]) // MOST_TASKS))
    tasks = (ends - 1) // share
    cuts = [0, *(np.flatnonzero(np.diff(tasks)) + 1).tolist(), len(pieces)]
    return [tuple(pieces[begin:end]) for begin, end in pairwise(cuts)]


Work = Callable[[MessageFiles, Stage, Piece], np.ndarray]
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

    def run(self, files: MessageFiles, stage: Stage) -> TaskResult:
        """The task's result: `leaves` has an array for each piece, or for each of `numbers` if it adds."""
        if not self.adds:
            return TaskResult(self.index, [self.work[piece.vector](files, stage, piece) for piece in self.pieces], {})
        sums: dict[int, np.ndarray] = {}
        for piece in self.pieces:
            part = self.work[piece.vector](files, stage, piece)
            sums[piece.vector] = sums[piece.vector] + part if piece.vector in sums else part
        return TaskResult(self.index, list(sums.values()), {})


# --- what workers compute of a piece ----------------------------------------------------------------------------------
def gram(files: MessageFiles, stage: Stage, piece: Piece, rows: np.ndarray) -> np.ndarray:
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
    files: MessageFiles, stage: Stage, piece: Piece, rows: np.ndarray, weights: np.ndarray,
    uniform: np.ndarray | None = None, statistics: np.ndarray | None = None, mean: np.ndarray | None = None,
) -> np.ndarray:  # fmt: skip
    """The sum of the rows with `weights`, (S,), in the form of `compared`.

    uniform: the weights in uniform pieces, None for the same. statistics: the weights of running statistics; none of
    them is negative, and their sum is 1 at most, so that no variance or count can become negative. mean: the weights of
    the mean with which the sum is compared, or None.
    """
    if piece.statistic and statistics is not None:
        weights = statistics
    elif piece.uniform and uniform is not None:
        weights = uniform
    both = weights[None] if mean is None or piece.follows else np.stack([weights, mean])
    used = np.flatnonzero(both.any(axis=0))
    sums = sums_of_rows(both[:, used], files.each_row(rows[used], piece.span), piece.span.length)
    return compared(sums[0], sums[1] if len(sums) > 1 else None)


def columns(
    files: MessageFiles, stage: Stage, piece: Piece, rows: np.ndarray, matrix: np.ndarray | None, f: int, scale: float,
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
    files: MessageFiles, stage: Stage, piece: Piece, rows: np.ndarray, matrix: np.ndarray | None, places: np.ndarray
) -> np.ndarray:
    """(S', n) float64: `matrix` times the rows, at those places that lie in the piece."""
    return combined(matrix, files.read(rows, piece.span)[:, in_piece(places, piece)]).astype(np.float64)


def signs(
    files: MessageFiles, stage: Stage, piece: Piece, rows: np.ndarray, matrix: np.ndarray | None, places: np.ndarray
) -> np.ndarray:
    """(S', 3) float64: how many of these values are positive, zero and negative."""
    x = values(files, stage, piece, rows, matrix, places)
    return np.stack([(x > 0).sum(axis=1), (x == 0).sum(axis=1), (x < 0).sum(axis=1)], axis=1).astype(np.float64)


# --- what workers write of an attack ----------------------------------------------------------------------------------
def forged(
    files: MessageFiles, stage: Stage, piece: Piece, rows: np.ndarray, to: np.ndarray, byzantine: int, length: int,
    key: Tensor, numbers: tuple[float, ...] | None = None,
) -> np.ndarray:  # fmt: skip
    """Write what Byzantine clients send, and return the squared norms, (1,) if all of them send the same, else (B,).

    rows: those that the attacker knows. to: those to write. byzantine, length, key: see `Columns`. numbers: of the
    attack's plan, or None to write its direction.
    """
    x = files.read_double(rows, piece.span)
    mean = np.add.reduce(x, axis=0) / len(x)
    squares = np.add.reduce(np.square(x - mean), axis=0)
    deviation = np.sqrt(squares / (len(x) - 1)) if len(x) > 1 else np.zeros_like(mean)
    known = Columns(x, mean, deviation, byzantine, numbers or (), piece.first, length, key)
    return written(files, piece, to, stage.attack.direction(known) if numbers is None else stage.attack.forge(known))


def written(files: MessageFiles, piece: Piece, to: np.ndarray, vectors: np.ndarray) -> np.ndarray:
    """Write (C,), or (B, C), into the rows `to`. Returns the squared norms of what was written."""
    vectors = np.atleast_2d(vectors)
    for row, each in zip(to.tolist(), vectors, strict=False):
        files.write_span(row, piece.span, each)
    stored = vectors.astype(files.numpy_dtypes[piece.span.leaf]).astype(np.float64)
    return np.square(stored).sum(axis=1)


# --- columns in ascending order ---------------------------------------------------------------------------------------
@lru_cache(16)
def network(count: int) -> tuple[tuple[int, int], ...]:
    """The comparisons (i, j), i < j, that sort `count` values: Batcher's odd-even merge sort (Knuth, volume 3, 5.2.2,
    algorithm M). Each is one minimum and one maximum over all columns at once, which is much faster than to sort each
    column."""
    found = []
    levels = max(count - 1, 0).bit_length()
    p = 1 << levels >> 1
    while p > 0:
        q, r, d = 1 << levels >> 1, 0, p
        while True:
            found += [(i, i + d) for i in range(count - d) if i & p == r]
            if q == p:
                break
            d, q, r = q - p, q >> 1, p
        p >>= 1
    return tuple(found)


def sort_columns(x: np.ndarray) -> np.ndarray:
    """(S, C): the columns of x, each in ascending order. -0 becomes 0. x has no NaN; it may be overwritten."""
    x += 0.0
    for begin in range(0, x.shape[1], SORTED_AT_ONCE):
        part = x[:, begin : begin + SORTED_AT_ONCE]
        rows = [row.copy() for row in part]
        spare = np.empty(part.shape[1], dtype=x.dtype)
        for i, j in network(len(rows)):
            low, high = rows[i], rows[j]
            np.minimum(low, high, out=spare)
            np.maximum(low, high, out=high)
            rows[i], spare = spare, low
        for target, row in zip(part, rows, strict=True):
            target[:] = row
    return x

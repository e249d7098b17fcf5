"""The messages of a round as one matrix that is never in memory.

For each vector of a message, the S messages of a round are the rows of a matrix (S, P). They lie in files, and
`Messages` reads of them what a rule or an attack asks for: inner products, values at some coordinates, counts of signs.
A combination of the messages is a small matrix in front of them, which costs nothing until something of it is read;
inner products of combinations follow from those of the messages, without another look at the files.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, eq=False, kw_only=True)
class Stored:
    """The messages of a round as they were sent: one vector of each. The engine has a subclass that reads them.

    norms2: (S,) their squared norms. has_gram: whether their inner products are read anyway, so that norms of
    combinations may follow from them.
    """

    norms2: np.ndarray
    has_gram: bool = False

    def gram(self) -> np.ndarray:
        """(S + E, S + E): the inner products of the messages and of the E extra vectors behind them."""
        raise NotImplementedError

    def values(self, places: np.ndarray, matrix: np.ndarray | None) -> np.ndarray:
        """(S', b) float64: `matrix` times the messages, (S', S), or the messages, at b coordinates in ascending
        order."""
        raise NotImplementedError

    def signs(self, places: np.ndarray, matrix: np.ndarray | None) -> np.ndarray:
        """(S', 3): how many of these values are positive, zero and negative."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False, kw_only=True)
class Messages:
    """S vectors, one in the place of each message: the messages themselves, or combinations of them.

    stored: the messages. length: P. round: its number. key: (), int64, of random numbers for this vector in this round,
    for `counted`. weights: (S,) the federation's client weights, 1 for combinations. f: how many of the vectors may be
    Byzantine. state: of the rule, from the round before. before: the vectors of which these are combinations, with the
    weights `step`, (S, S of before); None for the messages themselves. scaled: whether this step only multiplied each
    vector by a number.
    """

    stored: Stored
    length: int
    round: int
    key: Tensor
    weights: np.ndarray
    f: int = 0
    state: Any = ()
    before: Messages | None = None
    step: np.ndarray | None = None
    scaled: bool = False

    @property
    def count(self) -> int:
        """S."""
        return len(self.weights)

    @cached_property
    def matrix(self) -> np.ndarray | None:
        """(S, S of stored): the weights of the messages in all steps together; None for the messages themselves."""
        if self.before is None or self.step is None or self.before.matrix is None:
            return self.step
        return product(self.step, self.before.matrix)

    # --- what can be read ---------------------------------------------------------------------------------------------
    @property
    def norms2(self) -> np.ndarray:
        """(S,) the squared norms."""
        if self.before is None or self.step is None:
            return self.stored.norms2
        if self.scaled and not self.stored.has_gram:
            return np.square(np.diagonal(self.step)) * self.before.norms2
        return np.maximum(np.diagonal(self.gram()), 0.0)

    @property
    def norms(self) -> np.ndarray:
        """(S,) the norms."""
        return np.sqrt(self.norms2)

    def gram(self, extra: bool = False) -> np.ndarray:
        """(S, S) the inner products. extra: (S + E, S + E), with the extra vectors behind the messages: that of the
        rule, see `Aggregator.extra`, or those that an attack remembers and then its direction."""
        whole, _ = self._inner_products
        return whole if extra else whole[: self.count, : self.count]

    @property
    def distances2(self) -> np.ndarray:
        """(S, S) the squared distances, from the inner products. Distances that cannot be told from rounding errors are
        0, and copies of a vector are equally far from every other one. Of combinations, distances that only rounding
        makes different are equal, so that ties are ties."""
        found, errors = distances2(self.gram()), self.distance_errors
        if errors is None:
            return found
        pairs = np.triu_indices(len(found), 1)
        found[pairs] = merged(found[pairs], errors[pairs])
        return np.triu(found, 1) + np.triu(found, 1).T

    @property
    def distance_errors(self) -> np.ndarray | None:
        """(S, S) bounds of the rounding errors of `distances2`; None for the messages themselves."""
        gram, (_, errors) = self.gram(), self._inner_products
        if errors is None:
            return None
        errors = errors[: self.count, : self.count]
        own, norms2 = np.diagonal(errors), np.diagonal(gram)
        subtracted = 4 * UNIT * (norms2[:, None] + norms2[None, :])
        return own[:, None] + own[None, :] + 2 * errors + subtracted

    def at(self, places: np.ndarray) -> np.ndarray:
        """(S, b) float64: the vectors at some coordinates, which are given in ascending order."""
        return self.stored.values(places, self.matrix)

    def signs(self, window: slice) -> np.ndarray:
        """(S, 3): how many of some consecutive coordinates are positive, zero and negative in each vector."""
        return self.stored.signs(np.arange(window.start, window.stop), self.matrix)

    # --- what can be made of them -------------------------------------------------------------------------------------
    def combine(self, matrix: np.ndarray) -> Messages:
        """S' combinations of these vectors. matrix: (S', S), their weights."""
        return self._then(matrix, np.ones(len(matrix)), scaled=False)

    def scale(self, factors: np.ndarray) -> Messages:
        """Each vector multiplied by a number. factors: (S,). The client weights stay."""
        return self._then(np.diag(factors), self.weights, scaled=True)

    def _then(self, step: np.ndarray, weights: np.ndarray, scaled: bool) -> Messages:
        return replace(self, weights=weights, before=self, step=step, scaled=scaled)

    def sum(self, weights: np.ndarray) -> Answer:
        """The sum of the vectors with these weights: (S,), or (S + E,) with the extra vectors behind the messages."""
        return Answer(self, weights)

    def average(self, kept: np.ndarray | None = None, factors: np.ndarray | None = None) -> Answer:
        """The mean of the vectors with the client weights. kept: the positions of those that are averaged, or (S,)
        bool; by default all. factors: (S,), by which the vectors are multiplied first."""
        kept = np.arange(self.count) if kept is None else kept
        weights, own = np.zeros(self.count), self.weights[kept]
        weights[kept] = (own if factors is None else own * factors[kept]) / own.sum()
        return self.sum(weights)

    def by_coordinate(self, scale: float = 1.0) -> Answer:
        """What `Aggregator.columns` of the rule gives for each coordinate, times a number."""
        return Answer(self, None, scale)

    @cached_property
    def _inner_products(self) -> tuple[np.ndarray, np.ndarray | None]:
        """((S + E, S + E) the inner products with the extra vectors, bounds of their rounding errors or None)."""
        if self.before is None or self.step is None:
            return self.stored.gram(), None
        gram, errors = self.before._inner_products
        (rows, columns), extra = self.step.shape, len(gram) - self.before.count
        step = np.zeros((rows + extra, columns + extra))
        step[:rows, :columns] = self.step
        step[rows:, columns:] = np.eye(extra)
        return combined_gram(step, gram), combined_errors(step, gram, errors)


class Answer(NamedTuple):
    """The vector that takes the place of the messages. It is not computed yet.

    messages, weights: (S,) or (S + E,), the weights of these vectors in a sum, see `Messages.sum`; None for the rule's
    function of each coordinate. scale: what the answer is multiplied by. state: of the rule, for the next round.
    columns: numbers for the round's record, named without their prefix `robust/`. note: a sentence for the log, which
    has it once.
    """

    messages: Messages
    weights: np.ndarray | None
    scale: float = 1.0
    state: Any = ()
    columns: dict[str, float] = {}  # noqa: RUF012 never written to
    note: str = ""

    def stored_weights(self) -> np.ndarray:
        """(S,) or (S + E,): the weights of the messages as they were sent, for an answer that is a sum."""
        weights, matrix = self.weights, self.messages.matrix
        assert weights is not None
        if matrix is not None:
            own = product(matrix.T, weights[: len(matrix)])
            weights = np.append(own, weights[len(matrix) :])  # pre-aggregations leave extra vectors alone
        return weights * self.scale


def shortening(norms: np.ndarray, bound: float) -> np.ndarray:
    """(S,) min(1, bound / |x_i|), the factors that make no vector longer than the bound."""
    return np.minimum(1.0, np.divide(bound, norms, out=np.ones_like(norms), where=norms > 0))


def distances_from(weights: np.ndarray, gram: np.ndarray) -> np.ndarray:
    """(S,) the distances of S vectors from their sum with these weights. gram: (S, S) their inner products."""
    products = product(gram, weights)
    return np.sqrt(np.maximum(0.0, np.diagonal(gram) - 2 * products + float(product(weights, products))))


UNIT = 2.0**-53
"""The rounding error of one operation in float64, relative to its result."""


def merged(values: np.ndarray, errors: np.ndarray) -> np.ndarray:
    """(n,): the values; those that rounding errors alone may have made greater than another one become equal to it.
    errors: (n,), their bounds."""
    order = np.argsort(values, kind="stable")
    v, e, least = values[order], errors[order], np.arange(len(values))
    for place in (np.flatnonzero(np.diff(v) <= e[1:] + e[:-1]) + 1).tolist():
        before = least[place - 1]
        if v[place] - v[before] <= e[place] + e[before]:
            least[place] = before
    found = np.empty_like(values)
    found[order] = v[least]
    return found


def distances2(gram: np.ndarray) -> np.ndarray:
    """(S, S): the squared distances of S rows from their inner products; exactly 0 where they are below 2^-40 of the
    squared norms. A row has the distances of the first row that is a copy of it, to the bit: in inner products, copies
    may differ by rounding."""
    norms2 = np.diagonal(gram)
    total = norms2[:, None] + norms2[None, :]
    found = np.maximum(total - 2 * gram, 0.0)
    found[found <= 2.0**-40 * total] = 0.0
    np.fill_diagonal(found, 0.0)
    first = (found == 0).argmax(axis=1)
    return found if (first == np.arange(len(first))).all() else found[np.ix_(first, first)]


def product(*matrices: np.ndarray) -> np.ndarray:
    """The product of matrices, from the left. torch computes it, with the run's number of threads, so that the bits are
    the same in every process of a run; those of numpy may depend on the number of processors."""
    found = torch.from_numpy(np.ascontiguousarray(matrices[0]))
    for matrix in matrices[1:]:
        found = found @ torch.from_numpy(np.ascontiguousarray(matrix))
    return found.numpy()


def combined_gram(matrix: np.ndarray, gram: np.ndarray) -> np.ndarray:
    """The Gram matrix of the rows of `matrix` times rows with this Gram matrix; it is symmetric to the bit."""
    found = product(matrix, gram, matrix.T)
    return np.triu(found) + np.triu(found, 1).T


def combined_errors(matrix: np.ndarray, gram: np.ndarray, errors: np.ndarray | None) -> np.ndarray:
    """Bounds of the rounding errors of `combined_gram`: two products of n terms each, on a Gram matrix that has errors
    of its own."""
    inexact = 2 * (len(gram) + 1) * UNIT * np.abs(gram) + (0.0 if errors is None else errors)
    return product(np.abs(matrix), inexact, np.abs(matrix).T)

"""The contract of the stage between the clients' messages and the server's update.

    clip         bounds what one client sends; a wrapper of the method, whose `decode` does it (`Clip`)
    attack       Byzantine clients replace their messages                               (`Attack`)
    before       the messages become others, which are combinations of them             (`Before`)
    rule         one message takes the place of all of them; by default the mean        (`Aggregator`)
    noise        random numbers are added to the sums of the messages                   (`Noise`)

What the stage gives is handed to `Algorithm.server_update` as the mean message, so that every method works with every
rule. A rule acts on vectors. A vector is a floating leaf of `delta`, `sent`, `averaged` or `norm2`; see
`Aggregator.vectors`.
The S messages of a round are the rows of a matrix (S, P) for each vector, in ascending client number.

There are two ways through the stage. If all parts are additive (the mean, a bound on each message, noise on the sum),
workers add messages up as they come, and no message is stored. Otherwise the run collects: workers write each message
as a row of files, and what a rule declares in `reads` is computed from the rows by the workers, in pieces of the
coordinates. No process ever holds the S messages at once. A rule then decides in one of two ways: by weights, and the
answer is the weighted sum of the rows, or by columns, and the answer is a function of each coordinate's S values.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..contract import Algorithm, Message, Round

Reads = Literal["norms", "gram", "values", "signs", "last", "trusted"]
"""What a rule may read of the rows of a vector before it decides; see the fields of `Rows`."""
Vectors = Literal["each", "joint", "joined"]
Faults = int | Literal["expected", "known"]
"""f, the number of Byzantine messages that a rule must tolerate. "expected": S b / N rounded up, where b of the N
clients are Byzantine. "known": their number in the round, which no real server knows; for reference runs."""


class Rows(NamedTuple):
    """What a rule knows of the rows of one vector in a round.

    count: S, the number of rows. length: P. f: how many of the rows may be Byzantine. weights: (S,) the federation's
    client weights. norms2: (S,) the squared norms of the rows. round: its number. key: (), int64, of the rule's random
    numbers in this round, for `counted`. The others are None unless the rule reads them:

    gram: (S, S), the inner products of the rows. values: (S, b), the rows at the coordinates `Aggregator.places`.
    signs: (S, 3), the shares of positive, zero and negative values among the coordinates `Aggregator.window`. last:
    the vector that the rule gave in the round before appears as a further row, 0 at first. trusted: the displacement on
    the server's trusted data appears as a further row. A further row is the last one of `gram` and `norms2`, and is not
    counted in `count`.
    """

    count: int
    length: int
    f: int
    weights: np.ndarray
    norms2: np.ndarray
    round: int
    key: Tensor
    gram: np.ndarray | None = None
    values: np.ndarray | None = None
    signs: np.ndarray | None = None
    errors: np.ndarray | None = None
    """(S, S), bounds of the rounding errors that pre-aggregations have made in `gram`; None without any."""
    added_weight: float | None = None
    """The sum of the weights, where messages are added up: in the order of their sums, so that a rule that changes no
    message gives the bits of the mean."""

    @property
    def weight(self) -> float:
        """The sum of the client weights."""
        return float(self.weights.sum()) if self.added_weight is None else self.added_weight

    @property
    def norms(self) -> np.ndarray:
        """(S,) the norms of the rows."""
        return np.sqrt(self.norms2)

    @property
    def distances2(self) -> np.ndarray:
        """(S, S) the squared distances of the rows, from the Gram matrix. Distances that cannot be told from rounding
        errors are 0, and copies of a row are equally far from every other row. After pre-aggregations, distances that
        only rounding makes different are equal, so that ties are ties."""
        assert self.gram is not None
        found, errors = distances2(self.gram), self.distance_errors
        if errors is None:
            return found
        pairs = np.triu_indices(len(found), 1)
        found[pairs] = merged(found[pairs], errors[pairs])
        return np.triu(found, 1) + np.triu(found, 1).T

    @property
    def distance_errors(self) -> np.ndarray | None:
        """(S, S) bounds of the rounding errors of `distances2`; None without pre-aggregations."""
        if self.errors is None or self.gram is None:
            return None
        own, norms2 = np.diagonal(self.errors), np.diagonal(self.gram)
        subtracted = 4 * UNIT * (norms2[:, None] + norms2[None, :])
        return own[:, None] + own[None, :] + 2 * self.errors + subtracted


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


def in_proportion(count: int, drawn: int, cohort: int) -> int:
    """A number of messages in a round with `drawn` clients, rounded up, if it is `count` in one with `cohort`."""
    return -(-count * drawn // cohort)


class Decision(NamedTuple):
    """What a rule decides from `Rows`.

    weights: (S,), or (S + 1,) where the rule has a further row; the answer is the sum of the rows with these weights.
    None for a rule by columns. chosen: the positions of the rows whose columns are read, None for all. scale: what the
    columns' answer is multiplied by. state: of the rule, for the next round. columns: numbers for the round's record,
    named without their prefix `robust/`. note: a sentence for the log, which has it once.
    """

    weights: np.ndarray | None = None
    chosen: np.ndarray | None = None
    scale: float = 1.0
    state: Any = ()
    columns: dict[str, float] = {}  # noqa: RUF012 never written to
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Before(ABC):
    """A pre-aggregation: the rows become others, each of which is a combination of them."""

    table: ClassVar[str] = "PREAGGREGATORS"
    reads: ClassVar[tuple[Reads, ...]] = ()
    called: ClassVar[str] = "the pre-aggregation"
    condition: ClassVar[str] = ""
    """What `fewest` says, in words, as "2 f < S"."""
    takes_weights: ClassVar[bool] = True
    """Whether the federation's client weights may differ."""
    scales: ClassVar[bool] = False
    """Whether it only multiplies each row by a number."""
    mixes: ClassVar[bool] = False
    """Whether a Byzantine row may become a part of every row."""

    def fewest(self, f: int) -> int:
        """The fewest rows that it accepts."""
        return 1

    def faults(self, f: int) -> int:
        """f of this part, where the rule that follows it has `f`."""
        return f

    def scaled(self, drawn: int, cohort: int) -> Before:
        """The part for a round with `drawn` clients, see `Aggregator.scaled`. An f of its own is one of `cohort`."""
        own = getattr(self, "f", None)
        return self if own is None else replace(self, **{"f": in_proportion(own, drawn, cohort)})

    def count(self, rows: int) -> int:
        """The number of rows that it makes of `rows` rows."""
        return rows

    def keeps_mean(self, rows: int) -> bool:
        """Whether the mean of so many rows is the mean of what it makes of them."""
        return False

    @abstractmethod
    def matrix(self, rows: Rows) -> np.ndarray:
        """(S', S): the weights of the S rows in each of the S' rows that follow."""


@dataclass(frozen=True, kw_only=True)
class Aggregator(ABC):
    """A rule that makes one vector of S vectors.

    before: pre-aggregations, in order.
    vectors: "each": the rule runs on every vector by itself. "joint": it decides on `delta` alone, and its weights
    serve all vectors. "joined": it runs on one vector, to which all of them are joined.
    """

    table: ClassVar[str] = "AGGREGATORS"
    by: ClassVar[Literal["weights", "columns"]] = "weights"
    """How it answers from rows: by a weighted sum of them, or by a function of each coordinate's values."""
    adds: ClassVar[bool] = False
    """Whether it also answers from the sum of what `contribution` makes of each message. Then nothing is stored, unless
    an attack looks at other clients' messages."""
    reads: ClassVar[tuple[Reads, ...]] = ()
    called: ClassVar[str] = "the rule"
    """What it is called in a message, with its article."""
    condition: ClassVar[str] = ""
    """What `fewest` says, in words, as "2 f < S"."""
    takes_weights: ClassVar[bool] = True
    """Whether the federation's client weights count in its answer."""
    mixed_is_unsafe: ClassVar[bool] = False
    """Whether it may not follow pre-aggregations that mix Byzantine rows into all others."""
    steps: ClassVar[bool] = False
    """Whether its answer is a step of a length of its own, which is no mean of the messages. Running statistics are
    measured and take no such step; they are then averaged with the client weights."""

    before: tuple[Before, ...] = ()
    vectors: Vectors = "each"

    @property
    def faults(self) -> Faults:
        """f as it was configured; 0 for a rule without f."""
        return getattr(self, "f", 0)

    def fewest(self, f: int) -> int:
        """The fewest rows that it accepts."""
        return 1

    def refuses(self, rows: int, f: int) -> str:
        """Why it cannot be applied to so many rows, with the remedy; "" if it can. For what `fewest` cannot say."""
        return ""

    def is_mean(self, rows: int, f: int) -> bool:
        """Whether it is the mean for so many rows, without anything before it. Then the run adds messages up."""
        return False

    def scaled(self, drawn: int, cohort: int) -> Aggregator:
        """The rule for a round with `drawn` clients, if its settings are meant for `cohort` clients. Its own f is
        scaled by the engine, see `in_proportion`; numbers of messages that are settings too, and those of what stands
        before it, are scaled here."""
        if drawn == cohort or not self.before:
            return self
        return replace(self, before=tuple(part.scaled(drawn, cohort) for part in self.before))

    def init(self, length: int) -> Any:
        """The state before round 1, for a vector of so many numbers; () for none."""
        return ()

    def places(self, rows: Rows) -> np.ndarray:
        """The coordinates that `Rows.values` has; for a rule that reads "values"."""
        raise NotImplementedError

    def most_places(self, length: int) -> int:
        """The most coordinates of a vector that `places` names. length: P."""
        return length

    def window(self, rows: Rows) -> slice:
        """The consecutive coordinates whose signs `Rows.signs` counts; for a rule that reads "signs"."""
        raise NotImplementedError

    @abstractmethod
    def decide(self, rows: Rows, state: Any) -> Decision:
        """What to do with the rows."""

    def columns(self, x: np.ndarray, f: int) -> np.ndarray:
        """(C,) float64: the answer for C coordinates, for a rule by columns. x: (S, C), each column in ascending order,
        without NaN and without -0."""
        raise NotImplementedError

    def contribution(self, x: Tensor, y: Tensor) -> Tensor:
        """What is added up of one client's message. x: (P,), the vector. y: x itself, or numbers that follow x, such as
        running statistics. Runs vectorised."""
        return y

    def from_sum(self, total: Tensor, rows: Rows) -> Tensor:
        """The answer, float64, from the float64 sum of the contributions, weighted with the client weights. rows:
        `norms2` is known if the rule reads "norms"."""
        return total / rows.weight


@dataclass(frozen=True, kw_only=True)
class FewerThanHalf(Aggregator):
    """A rule that tolerates f Byzantine messages if they are fewer than half, and is the mean with f = 0."""

    f: Faults

    condition: ClassVar[str] = "2 f < S"

    def fewest(self, f: int) -> int:
        return 2 * f + 1

    def is_mean(self, rows: int, f: int) -> bool:
        return f == 0


@dataclass(frozen=True, kw_only=True)
class ByCoordinate(Aggregator):
    """A rule that is nothing but a function of each coordinate's values, `columns`. It knows no client weights."""

    by: ClassVar[Literal["weights", "columns"]] = "columns"
    takes_weights: ClassVar[bool] = False

    def decide(self, rows: Rows, state: Any) -> Decision:
        return Decision()


@dataclass(frozen=True, kw_only=True)
class Mean(Aggregator):
    """The mean of the messages, with the federation's client weights."""

    adds: ClassVar[bool] = True
    called: ClassVar[str] = "the mean"
    mixed_is_unsafe: ClassVar[bool] = True

    def is_mean(self, rows: int, f: int) -> bool:
        return True

    def decide(self, rows: Rows, state: Any) -> Decision:
        return Decision(rows.weights / rows.weights.sum())


class Released(NamedTuple):
    """What the noise makes of the sums. mean: the mean message, in float64. state: of the noise, for the next round.
    columns: numbers for the round's record, by their whole names."""

    mean: Message
    state: Any = ()
    columns: dict[str, float] = {}  # noqa: RUF012 never written to


class Noise(ABC):
    """Random numbers on the sums of the messages, as a private server adds them. It goes with the mean alone."""

    def init(self, sample: Message) -> Any:
        """The state before round 1; () for none. sample: a decoded message, for its structure and shapes."""
        return ()

    @abstractmethod
    def release(self, sums: Message, state: Any, round: Round) -> Released:
        """The mean message in float64 from the sums of the messages in float64.

        sums: summed in the order of the tree, each client's message weighted by its client weight. round: `cohort` is
        the number of clients in the sums. The engine converts the mean to the dtypes of the message.
        """


class Clip(ABC):
    """A bound on what one client sends."""

    @abstractmethod
    def wrap(self, method: Algorithm, round: int = 1) -> Algorithm:
        """The method whose `decode` bounds the message, with the settings of a round (1 ... R). It is the outermost
        wrapper of the run's method: what it gives is what an attack replaces and what workers add up."""


@dataclass(frozen=True)
class Stage:
    """The parts of a run's stage. The default is the mean."""

    rule: Aggregator = Mean()
    attack: Any = None
    clip: Clip | None = None
    noise: Noise | None = None

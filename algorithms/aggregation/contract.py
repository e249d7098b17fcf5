"""The contract of the stage between the clients' messages and the server's update.

    clip         bounds what one client sends; a wrapper of the method, whose `decode` does it (`Clip`)
    attack       Byzantine clients replace their messages                               (`Attack`)
    before       the messages become others, which are combinations of them             (`Before`)
    rule         one message takes the place of all of them; by default the mean        (`Aggregator`)
    noise        random numbers are added to the sums of the messages                   (`Noise`)

What the stage gives is handed to `Algorithm.server_update` as the mean message, so that every method works with every
rule, but for those whose server needs a mean, compares the messages by itself, or gets none. A rule acts on vectors. A
vector is a floating leaf of `delta`, `sent`, `averaged` or `norm2`; see `Aggregator.vectors`.
The S messages of a round are the rows of a matrix (S, P) for each vector, in ascending client number.

There are two ways through the stage. If all parts are additive (the mean, a bound on each message, noise on the sum),
workers add messages up as they come, and no message is stored. Otherwise the run collects: workers write each message
as a row of files, and what a rule reads of `Messages` is computed from the rows by the workers, in pieces of the
coordinates. No process ever holds the S messages at once. A rule answers in one of two ways: by weights, with a sum of
the messages, or by columns, with a function of each coordinate's S values.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
from torch import Tensor

from ..contract import Algorithm, Message, Round
from .messages import Answer, Messages

Vectors = Literal["each", "joint", "joined"]
Faults = int | Literal["expected", "known"]
"""f, the number of Byzantine messages that a rule must tolerate. "expected": S b / N rounded up, where b of the N
clients are Byzantine. "known": their number in the round, which no real server knows; for reference runs."""


def in_proportion(count: int, drawn: int, cohort: int) -> int:
    """A number of messages in a round with `drawn` clients, rounded up, if it is `count` in one with `cohort`."""
    return -(-count * drawn // cohort)


@dataclass(frozen=True, kw_only=True)
class Before(ABC):
    """A pre-aggregation: the messages become others, each of which is a combination of them."""

    table: ClassVar[str] = "PREAGGREGATORS"
    pairwise: ClassVar[bool] = False
    """Whether it compares messages in pairs, see `Aggregator.pairwise`."""
    called: ClassVar[str] = "the pre-aggregation"
    condition: ClassVar[str] = ""
    """What `fewest` says, in words, as "2 f < S"."""
    takes_weights: ClassVar[bool] = True
    """Whether the federation's client weights may differ."""
    mixes: ClassVar[bool] = False
    """Whether a Byzantine row may become a part of every row."""

    def fewest(self, f: int) -> int:
        """The fewest rows that it accepts."""
        return 1

    def faults(self, f: int) -> int:
        """f of this part, where the rule that follows it has `f`: its own if it has one."""
        own = getattr(self, "f", None)
        return f if own is None else own

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
    def apply(self, x: Messages) -> Messages:
        """The combinations of the messages that follow, by `Messages.combine` or `Messages.scale`."""


@dataclass(frozen=True, kw_only=True)
class Aggregator(ABC):
    """A rule that makes one vector of S vectors.

    before: pre-aggregations, in order.
    vectors: "each": the rule runs on every vector by itself. "joint": it decides on `delta` alone, and its weights
    serve all vectors. "joined": it runs on one vector, to which all of them are joined.
    """

    table: ClassVar[str] = "AGGREGATORS"
    by: ClassVar[Literal["weights", "columns"]] = "weights"
    """How it answers: by a weighted sum of the messages, or by a function of each coordinate's values."""
    adds: ClassVar[bool] = False
    """Whether it also answers from the sum of what `contribution` makes of each message. Then nothing is stored, unless
    an attack looks at other clients' messages."""
    pairwise: ClassVar[bool] = False
    """Whether it compares messages in pairs, by inner products or distances. These are then computed for all vectors
    at once before it is asked, and a run is refused if its S x S numbers do not fit the memory."""
    extra: ClassVar[Literal["", "last", "trusted"]] = ""
    """The extra vector behind the messages, see `Messages.gram`. "last": what the rule gave in the round before, 0 at
    first; "trusted": the displacement on the server's trusted data."""
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

    @abstractmethod
    def aggregate(self, x: Messages) -> Answer:
        """The answer, by `Messages.average`, `Messages.sum` or `Messages.by_coordinate`."""

    def columns(self, x: np.ndarray, f: int) -> np.ndarray:
        """(C,) float64: the answer for C coordinates, for a rule by columns. x: (S, C), each column in ascending order,
        without NaN and without -0."""
        raise NotImplementedError

    def contribution(self, x: Tensor, y: Tensor) -> Tensor:
        """What is added up of one client's message. x: (P,), the vector. y: x itself, or numbers that follow x, such as
        running statistics. Runs vectorised."""
        return y

    def from_sum(self, total: Tensor, weight: float, x: Messages) -> Tensor:
        """The answer, float64, from the float64 sum of the contributions, weighted with the client weights. weight: the
        sum of these, in the order of the sums. x: the messages, of which only the norms can be read."""
        return total / weight


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

    def aggregate(self, x: Messages) -> Answer:
        return x.by_coordinate()


@dataclass(frozen=True, kw_only=True)
class Mean(Aggregator):
    """The mean of the messages, with the federation's client weights."""

    adds: ClassVar[bool] = True
    called: ClassVar[str] = "the mean"
    mixed_is_unsafe: ClassVar[bool] = True

    def is_mean(self, rows: int, f: int) -> bool:
        return True

    def aggregate(self, x: Messages) -> Answer:
        return x.average()


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

"""The contract of an attack: what the Byzantine clients of a run do.

Byzantine clients train like all others, and their states are updated as those of honest clients. What they send instead
of their messages, after `decode`, follows the attack, on every vector of the message by the same formula
(`Aggregator.vectors` says what a vector is). There are three kinds of attacks:

    PoisoningAttack  changes the training data, and perhaps scales the message
    OwnAttack        a function of the client's own message; it needs no other message, and no message is stored
    CohortAttack     a function of the messages of others; the run collects messages

Messages are displacements y_K - x, not gradients: a formula that is printed for gradients has the opposite sign here.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
from torch import Tensor

from ...workloads import counted
from ..aggregation.messages import Messages

Knows = Literal["honest", "own"]


@dataclass(frozen=True, kw_only=True)
class Attack(ABC):  # noqa: B024 its kinds have the abstract methods
    """Who attacks, and when.

    share: of the clients that are Byzantine; or clients: their numbers. knows: "honest": the messages of the honest
    clients of the round; "own": only what the Byzantine clients themselves would have sent, which takes their place in
    every formula. rounds: the first and the last round of the attack, as "10-20" (default: all rounds).
    """

    table: ClassVar[str] = "ATTACKS"
    called: ClassVar[str] = "the attack"

    share: float | None = None
    clients: tuple[int, ...] | None = None
    knows: Knows = "honest"
    rounds: str | None = None

    def __post_init__(self) -> None:
        if (self.share is None) == (self.clients is None):
            raise ValueError(f"give share or clients, got share={self.share}, clients={self.clients}")
        if self.share is not None and not 0 <= self.share < 1:
            raise ValueError(f"0 <= share < 1 must hold, got share={self.share}")
        if self.rounds is not None and not re.fullmatch(r"\d+-\d+", self.rounds):
            raise ValueError(f"rounds must be the first and the last round, as in '10-20', got {self.rounds!r}")

    def members(self, clients: int, seed: int) -> np.ndarray:
        """(N,) bool: which clients are Byzantine. With `share` they are drawn from the seed, for the whole run."""
        found = np.zeros(clients, dtype=bool)
        if self.clients is not None:
            if outside := [number for number in self.clients if not 0 <= number < clients]:
                raise ValueError(f"clients must be numbers from 0 to {clients - 1}, got {outside[0]}")
            found[list(self.clients)] = True
            return found
        assert self.share is not None
        count = round(self.share * clients)
        found[counted.numpy_generator(seed, "byzantine").choice(clients, count, replace=False)] = True
        return found

    def active(self, round: int) -> bool:
        """Whether the attack takes place in this round."""
        if self.rounds is None:
            return True
        first, last = map(int, self.rounds.split("-"))
        return first <= round <= last

    @property
    def silent(self) -> bool:
        """Whether Byzantine clients send nothing."""
        return False

    @property
    def collects(self) -> bool:
        """Whether the messages of a round must be there at once."""
        return False


class Sender(NamedTuple):
    """One Byzantine client in a round. cohort: the number of clients of the round; byzantine: how many of them are
    Byzantine. key: (), int64, of this client's random numbers for one vector in this round, for `counted`."""

    cohort: int
    byzantine: int
    key: Tensor


@dataclass(frozen=True, kw_only=True)
class OwnAttack(Attack):
    """An attack by each Byzantine client alone."""

    @abstractmethod
    def send(self, own: Tensor, sender: Sender) -> Tensor:
        """What the client sends in the place of a vector. own: (P,), its honest vector."""


@dataclass(frozen=True, kw_only=True)
class PoisoningAttack(OwnAttack):
    """An attack on the data of the Byzantine clients. workload: the name in the table WORKLOADS of the workload that
    poisons the data, which is built with the run's workload as `of` and the Byzantine clients as `clients`."""

    workload: ClassVar[str]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rounds is not None:
            raise ValueError(f"rounds: the data are poisoned for the whole run, got rounds={self.rounds}; drop it")

    def arguments(self) -> dict[str, Any]:
        """Further arguments of the poisoning workload."""
        return {}

    @property
    def sends(self) -> bool:
        """Whether the message is changed, too."""
        return False

    def send(self, own: Tensor, sender: Sender) -> Tensor:
        return own


class Columns(NamedTuple):
    """C consecutive coordinates of the messages that the attacker knows.

    rows: (h, C) float64. mean, deviation: (C,) of the rows; the deviation has the divisor h - 1 and is 0 for one row.
    byzantine: B, the messages that the attacker sends. numbers: `Plan.numbers`. begin: the first coordinate. length: P.
    key: (), int64, of the random numbers of the attack for this vector in this round; `draws` has random vectors of
    length P that can be cut.
    """

    rows: np.ndarray
    mean: np.ndarray
    deviation: np.ndarray
    byzantine: int
    numbers: tuple[float, ...]
    begin: int
    length: int
    key: Tensor

    @property
    def end(self) -> int:
        """The coordinate behind the last one."""
        return self.begin + len(self.mean)


@dataclass(frozen=True, eq=False, kw_only=True)
class Seen(Messages):
    """What an attacker sees of one vector in a round: the messages that it knows.

    The extra vectors behind them are those that the attack remembers, then its direction. byzantine: B, the messages
    that it sends. clients: (h,) the clients of the known messages. error: function of weights of the known messages
    and the extra vectors -> |F - mean| if all Byzantine clients send the sum with these weights, for an attack that
    searches against the run's rule; else None.
    """

    byzantine: int
    clients: np.ndarray
    error: Callable[[np.ndarray], float] | None = None

    @property
    def total(self) -> int:
        """S, all messages of the round."""
        return self.count + self.byzantine

    @property
    def mean(self) -> np.ndarray:
        """The weights of the mean of the known messages, among these and the extra vectors."""
        extra = len(self.gram(extra=True)) - self.count
        return np.concatenate([np.full(self.count, 1.0 / self.count), np.zeros(extra)])

    def signs_of_mean(self) -> np.ndarray:
        """(3,): how many coordinates of the mean of the known messages are positive, zero and negative."""
        return self.combine(np.full((1, self.count), 1 / self.count)).signs(slice(0, self.length))[0]


class Plan(NamedTuple):
    """What an attacker decides for one vector.

    numbers: for `forge`. remember: for each vector that the attack remembers its weights among the known messages and
    the extra vectors. state: numbers for the next round. columns: for the record, named without their prefix `attack/`.
    """

    numbers: tuple[float, ...] = ()
    remember: tuple[np.ndarray, ...] = ()
    state: tuple[Tensor, ...] = ()
    columns: dict[str, float] = {}  # noqa: RUF012 never written to


@dataclass(frozen=True, kw_only=True)
class CohortAttack(Attack):
    """An attack that looks at the messages of other clients.

    In a round the engine asks for a `plan` for each vector, and has workers `forge` the Byzantine rows, piece by piece.
    """

    pairwise: ClassVar[bool] = False
    """Whether it looks at inner products of the known messages. Their numbers must then fit the memory."""
    directs: ClassVar[bool] = False
    """Whether it has a `direction`."""
    remembers: ClassVar[int] = 0
    """The number of vectors that it remembers from round to round, 0 at first."""
    searches: ClassVar[bool] = False
    """Whether it searches against the run's own rule, see `Seen.error`."""

    @property
    def collects(self) -> bool:
        return True

    def init(self) -> tuple[Tensor, ...]:
        """The numbers of `Plan.state` before round 1."""
        return ()

    def direction(self, x: Columns) -> np.ndarray:
        """(C,): a vector whose inner products with the known messages the plan needs."""
        raise NotImplementedError

    def plan(self, seen: Seen, state: tuple[Tensor, ...]) -> Plan:
        """What to send."""
        return Plan()

    @abstractmethod
    def forge(self, x: Columns) -> np.ndarray:
        """(C,): what all Byzantine clients send; or (B, C), a row for each of them."""

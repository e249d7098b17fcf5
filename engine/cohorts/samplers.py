"""How the clients of a round are chosen: the parts that `federation.sampler` names.

A sampler is a frozen dataclass of settings. Its state is a dict of small arrays, which are replaced and never changed
in place, and which the driver commits with the round. Every draw is a function of (seed, purpose, client, number of the
round). Sampling with unequal probabilities is put right by the weights of the messages in the mean, see `Draw`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Literal, NamedTuple

import numpy as np
import torch

from ...workloads import counted

State = Mapping[str, np.ndarray]
"""The state of a sampler by name."""


NOBODY = np.zeros(0, dtype=np.int64)
"""No client numbers."""


class Ask(NamedTuple):
    """What a draw may depend on."""

    seed: int
    number: int  # of the round, from 1
    clients: int  # N
    size: int  # S, how many are wanted
    spares: int  # how many more are wanted, in case that others are late or lost
    eligible: np.ndarray | None  # the ascending numbers of the clients that can be drawn; None for all
    sizes: np.ndarray  # (N,) examples
    target: np.ndarray | None  # (N,) p_i, the weights of the mean that is wanted, which sum to 1; None for 1 / N each
    steps: np.ndarray  # (N,) local steps of a whole visit
    batch: int  # examples in a batch
    probe: Callable[[np.ndarray, int | None], np.ndarray]  # (clients, rows of each or None for all) -> (c,) losses
    duration: Callable[[], np.ndarray]  # -> (N,) seconds of a visit of every client; ones without a virtual clock
    groups: np.ndarray | None = None  # (N,) the group of each client, from 0, if the sampler is `grouped_by` some

    @property
    def candidates(self) -> np.ndarray:
        """The ascending numbers of the clients that can be drawn."""
        return np.arange(self.clients) if self.eligible is None else self.eligible

    def uniform(self, purpose: str, clients: np.ndarray) -> np.ndarray:
        """(c,) float64 in [0, 1): a draw of this round for each client."""
        keys = counted.key(self.seed, purpose, np.ascontiguousarray(clients, dtype=np.int64), self.number)
        return counted.uniform(torch.from_numpy(keys), 1)[:, 0].numpy()

    def shares(self) -> np.ndarray:
        """(N,) p_i."""
        return np.full(self.clients, 1 / self.clients) if self.target is None else self.target

    def shares_of(self, candidates: np.ndarray) -> np.ndarray:
        """(c,) p_i of the clients that can be drawn, as parts of their sum: the mean that is wanted is one over these
        clients."""
        shares = self.shares()[candidates]
        return shares if len(candidates) == self.clients else shares / shares.sum()


class Draw(NamedTuple):
    """The clients of a round, and their weights in the mean: (sum of w_i delta_i) / D."""

    clients: np.ndarray  # ascending and distinct
    spares: np.ndarray = NOBODY  # ascending and distinct, none of them in `clients`
    weights: np.ndarray | None = None  # (N,) w_i of each client; None for the federation's own client weights
    divisor: float | None = None  # D; None for the sum of w_i over the clients that are used
    columns: Mapping[str, float] = {}  # for the record
    note: Mapping[str, np.ndarray] = {}  # what `told` needs of this draw


class Feedback(NamedTuple):
    """What a sampler learns at the commit of a round."""

    clients: np.ndarray  # (c,) those that were used, ascending
    loss: np.ndarray  # (c,) the mean training loss of each
    rms: np.ndarray = np.zeros(0)  # (c,) of the losses of each client's examples, only for `Sampler.needs_rms`
    late: np.ndarray = NOBODY  # those that were drawn and cut off, ascending


class Sampler(ABC):
    """How the clients of a round are chosen."""

    table: ClassVar[str] = "SAMPLERS"
    fixed: ClassVar[bool] = True
    """Whether a draw gives at least as many clients as are wanted, where there are enough."""
    gives_spares: ClassVar[bool] = False
    """Whether a draw can have spare clients."""
    has_probabilities: ClassVar[bool] = True
    """Whether the expected number of times that a client is drawn is known."""
    sets_weights: ClassVar[bool] = False
    """Whether the weights of the mean are what the sampler is for, so that it needs a method with client weights."""

    @property
    def needs_rms(self) -> bool:
        """Whether `told` needs the root mean square of the losses of a client's examples, over the first gradients of
        all its local steps. Compiled chains have no losses of single examples."""
        return False

    @property
    def grouped_by(self) -> str | None:
        """The training column whose values are the groups of the clients that `Ask.groups` has; None for none."""
        return None

    def check_groups(self, count: int) -> None:  # noqa: B027 most samplers know no groups
        """Raise ValueError where the sampler does not fit so many groups of a column."""

    def check(self, clients: int, cohort: int, weights: str) -> None:  # noqa: B027 most samplers fit always
        """Raise ValueError where the sampler does not fit the federation. weights: federation.weights."""

    def start(self, clients: int, cohort: int) -> State:
        """The state before round 1."""
        return {}

    def sizes(self, seed: int, rounds: int, clients: int, cohort: int) -> frozenset[int]:
        """The numbers of clients in the rounds of a run, as far as they are known before."""
        return frozenset([cohort])

    def wanted(self, ask: Ask) -> int:
        """How many clients' messages a round waits for; where a draw has more clients, the last ones are late."""
        return ask.size

    @abstractmethod
    def draw(self, state: State, ask: Ask) -> Draw:
        """The clients of a round. Each round is drawn once for each time that it is run."""

    def told(self, state: State, ask: Ask, draw: Draw, feedback: Feedback) -> State:
        """The state after the round, at its commit."""
        return state


class CountedSampler(Sampler):
    """A sampler whose cohorts follow from the seed and the number of the round alone, so that they may be drawn before
    it, and whose messages have the federation's own weights; see `config.schema.COUNTED`."""

    @abstractmethod
    def cohort(self, seed: int, number: int, clients: int, size: int) -> np.ndarray:
        """(m,) distinct client numbers, ascending: the cohort of a round. number: from 1. size: S."""

    def draw(self, state: State, ask: Ask) -> Draw:
        return Draw(self.cohort(ask.seed, ask.number, ask.clients, ask.size), NOBODY)


# --- draws that follow from the seed and the round alone --------------------------------------------------------------
def philox(*parts: int | str) -> np.random.Generator:
    """A numpy generator whose key follows from the parts: one generator for each counted draw."""
    return np.random.Generator(np.random.Philox(key=int(counted.key(*parts)) & (1 << 64) - 1))


def sample(seed: int, round: int, clients: int, cohort: int) -> np.ndarray:
    """(S,) distinct client numbers in ascending order, drawn uniformly without replacement."""
    if cohort == clients:
        return np.arange(clients)
    drawn = philox(seed, "cohort", round).choice(clients, cohort, replace=False, shuffle=False)
    return np.sort(drawn.astype(np.int64))


def binomial_size(seed: int, round: int, clients: int, rate: float) -> int:
    """How many of these clients a round has if each takes part with probability `rate`, independently of the others."""
    return int(philox(seed, "cohort size", round).binomial(clients, rate))


@lru_cache(8)
def binomial_sizes(seed: int, rounds: int, groups: tuple[int, ...], rate: float) -> frozenset[int]:
    """The numbers of clients in the rounds of a run. groups: the sizes of the groups that take turns."""
    return frozenset(
        binomial_size(seed, round, groups[(round - 1) % len(groups)], rate) for round in range(1, rounds + 1)
    )


@lru_cache(1)
def groups_in_turns(seed: int, clients: int, separation: int) -> list[np.ndarray]:
    """The groups of clients that take turns, each in ascending order; cached, since every round needs one of them."""
    permuted = philox(seed, "groups").permutation(clients)
    return [np.sort(permuted[group::separation]) for group in range(separation)]


# --- two ways to draw in proportion to rates --------------------------------------------------------------------------
def race(ask: Ask, purpose: str, clients: np.ndarray, rates: np.ndarray, count: int) -> np.ndarray:
    """`count` of these clients, ascending, drawn one after another in proportion to their rates (c,) among the rest:
    the first in a race whose times are exponential. Their inclusion is not exactly in proportion."""
    times = -np.log1p(-ask.uniform(purpose, clients)) / rates
    return np.sort(clients[np.lexsort((clients, times))[:count]])


def capped(rates: np.ndarray, count: float) -> np.ndarray:
    """(c,) inclusion probabilities in proportion to the rates (c,) that sum to `count`, none above 1: what is cut off
    goes to the others in proportion."""
    if count >= len(rates):
        return np.ones(len(rates))
    full = np.zeros(len(rates), dtype=bool)
    while True:
        rest = np.where(full, 0.0, rates)
        pi = np.where(full, 1.0, rest * ((count - full.sum()) / rest.sum()))
        over = pi > 1
        if not over.any():
            return pi
        full |= over


def systematic(ask: Ask, purpose: str, clients: np.ndarray, pi: np.ndarray) -> np.ndarray:
    """The clients, ascending, that a systematic draw in a random order takes: each with exactly its probability pi."""
    order = np.lexsort((clients, ask.uniform(f"{purpose} order", clients)))
    ends = np.cumsum(pi[order])
    ends[-1] = round(float(ends[-1]))  # the probabilities sum to the number that is drawn
    u = float(philox(ask.seed, purpose, ask.number).random())
    passed = np.floor(ends - u)
    taken = passed > np.concatenate([[np.floor(-u)], passed[:-1]])
    return np.sort(clients[order][taken])


# --- samplers ---------------------------------------------------------------------------------------------------------
def uniform_draw(ask: Ask, purpose: str, clients: np.ndarray, count: int) -> np.ndarray:
    """`count` of these ascending clients, ascending, uniformly without replacement; all of them if there are fewer."""
    count = min(count, len(clients))
    if purpose == "cohort":
        return clients[sample(ask.seed, ask.number, len(clients), count)]
    if count == len(clients):
        return clients
    return np.sort(clients[philox(ask.seed, purpose, ask.number).choice(len(clients), count, replace=False)])


def uniform_spares(ask: Ask, clients: np.ndarray, drawn: np.ndarray) -> np.ndarray:
    """Spares, uniformly among the clients that were not drawn."""
    if not ask.spares:
        return NOBODY
    return uniform_draw(ask, "spare", np.setdiff1d(clients, drawn, assume_unique=True), ask.spares)


@dataclass(frozen=True)
class UniformSampler(CountedSampler):
    """The cohort is drawn uniformly without replacement.

    first: in round 1 a `cohort` is drawn as in any other, or `all` clients take part that can, as MIFA has it (Gu et
    al. 2021).
    """

    gives_spares: ClassVar[bool] = True

    first: Literal["cohort", "all"] = "cohort"

    def _has_all(self, number: int) -> bool:
        return self.first == "all" and number == 1

    def cohort(self, seed: int, number: int, clients: int, size: int) -> np.ndarray:
        return sample(seed, number, clients, clients if self._has_all(number) else size)

    def sizes(self, seed: int, rounds: int, clients: int, cohort: int) -> frozenset[int]:
        later = [cohort] if rounds > 1 or self.first == "cohort" else []
        return frozenset([*later, *([clients] if self.first == "all" else [])])

    def wanted(self, ask: Ask) -> int:
        return ask.clients if self._has_all(ask.number) else ask.size

    def draw(self, state: State, ask: Ask) -> Draw:
        if ask.eligible is None:
            clients = self.cohort(ask.seed, ask.number, ask.clients, ask.size)
        elif self._has_all(ask.number):
            clients = ask.eligible
        else:
            clients = uniform_draw(ask, "cohort", ask.eligible, ask.size)
        spares = uniform_spares(ask, ask.candidates, clients) if ask.spares else NOBODY
        return Draw(clients, spares)


@dataclass(frozen=True)
class Binomial(CountedSampler):
    """Every client takes part with probability S / N, independently of the others. The mean is over those that do.

    Their number is drawn first, so that the cost does not depend on the number of clients. It is the Poisson sampling
    of differential privacy; `poisson` has the same cohorts in distribution, and divides by what makes it unbiased.
    """

    fixed: ClassVar[bool] = False

    def cohort(self, seed: int, number: int, clients: int, size: int) -> np.ndarray:
        return sample(seed, number, clients, binomial_size(seed, number, clients, size / clients))

    def sizes(self, seed: int, rounds: int, clients: int, cohort: int) -> frozenset[int]:
        return binomial_sizes(seed, rounds, (clients,), cohort / clients)


@dataclass(frozen=True)
class Turns(CountedSampler):
    """Random groups of clients take turns, and each client of the group whose turn it is takes part with the same
    probability, independently of the others, so that S is the mean number of clients. A group of S takes part as a
    whole.

    separation: the number of groups, and so the fewest rounds from one turn of a client to its next, at least 1;
    cohort * separation must be at most `clients`.
    """

    fixed: ClassVar[bool] = False

    separation: int

    def cohort(self, seed: int, number: int, clients: int, size: int) -> np.ndarray:
        group = groups_in_turns(seed, clients, self.separation)[(number - 1) % self.separation]
        if size * self.separation == clients:
            return group
        drawn = binomial_size(seed, number, len(group), size * self.separation / clients)
        return group[sample(seed, number, len(group), drawn)]

    def sizes(self, seed: int, rounds: int, clients: int, cohort: int) -> frozenset[int]:
        if cohort * self.separation == clients:
            return frozenset([cohort])
        groups = tuple(len(range(first, clients, self.separation)) for first in range(self.separation))
        return binomial_sizes(seed, rounds, groups, cohort * self.separation / clients)


@dataclass(frozen=True)
class Replacement(Sampler):
    """S draws with replacement. A client that is drawn several times does its work once and weighs as much more.

    by: whether each draw is uniform over the `clients` or in proportion to their numbers of `examples`.
    """

    by: Literal["clients", "examples"] = "clients"

    def draw(self, state: State, ask: Ask) -> Draw:
        candidates = ask.candidates
        rates = np.ones(len(candidates)) if self.by == "clients" else ask.sizes[candidates].astype(float)
        ends = np.cumsum(rates / rates.sum())
        keys = counted.key(ask.seed, "draw", np.full(ask.size, ask.number), np.arange(ask.size))
        u = counted.uniform(torch.from_numpy(keys), 1)[:, 0].numpy()
        places = np.minimum(np.searchsorted(ends, u * ends[-1], "right"), len(candidates) - 1)
        times = np.bincount(places, minlength=len(candidates))
        weights = np.zeros(ask.clients)
        q = rates / rates.sum()
        weights[candidates] = times * ask.shares_of(candidates) / q
        return Draw(candidates[times > 0], NOBODY, weights, float(ask.size))


@dataclass(frozen=True)
class PoissonSampler(Sampler):
    """Every client takes part with probability S / N, independently of the others.

    divisor: what the sum is divided by, the `expected` number of clients or that of the `realised` ones; empty: whether
    a round without clients is skipped, so that the server's state stays as it is, or is a step with a zero mean.
    """

    fixed: ClassVar[bool] = False

    divisor: Literal["expected", "realised"] = "expected"
    empty: Literal["skip", "step"] = "skip"

    def draw(self, state: State, ask: Ask) -> Draw:
        candidates = ask.candidates
        clients = candidates[ask.uniform("poisson", candidates) < ask.size / ask.clients]
        weights = ask.clients * ask.shares()
        divisor = float(ask.size) if self.divisor == "expected" else None
        return Draw(clients, NOBODY, weights, divisor)


@dataclass(frozen=True)
class Separated(Sampler):
    """The cohort is drawn uniformly among the clients that none of the last `rounds` - 1 cohorts had.

    rounds: the fewest rounds from one draw of a client to its next, at least 1. stateless: instead a client may be
    drawn only in every rounds-th round, which needs no memory; cohorts may then be smaller.
    """

    gives_spares: ClassVar[bool] = True

    rounds: int
    stateless: bool = False

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise ValueError(f"rounds >= 1 must hold, got {self.rounds}; raise it")

    def check(self, clients: int, cohort: int, weights: str) -> None:
        if cohort * self.rounds > clients:
            raise ValueError(
                f"cohort * rounds <= clients must hold, got cohort={cohort}, rounds={self.rounds}, clients={clients}; "
                "lower one"
            )

    def start(self, clients: int, cohort: int) -> State:
        return {} if self.stateless else {"last": np.full(clients, -self.rounds, dtype=np.int64)}

    def draw(self, state: State, ask: Ask) -> Draw:
        candidates = ask.candidates
        if self.stateless:
            group = counted.high_bits(counted.key(ask.seed, "group", candidates), 62) % self.rounds
            candidates = candidates[group == ask.number % self.rounds]
        else:
            candidates = candidates[ask.number - state["last"][candidates] >= self.rounds]
        drawn = uniform_draw(ask, "cohort", candidates, ask.size)
        return Draw(drawn, uniform_spares(ask, candidates, drawn))

    def told(self, state: State, ask: Ask, draw: Draw, feedback: Feedback) -> State:
        if self.stateless:
            return state
        last = state["last"].copy()
        last[np.concatenate([draw.clients, draw.spares])] = ask.number
        return {"last": last}


@dataclass(frozen=True)
class WeightedSampler(Sampler):
    """Clients are drawn without replacement in proportion to their numbers of examples.

    exact: whether the probabilities are exactly in proportion, up to 1, or those of drawing one client after another.
    """

    exact: bool = True

    @property
    def has_probabilities(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.exact

    def check(self, clients: int, cohort: int, weights: str) -> None:
        if not self.exact and weights != "examples":
            raise ValueError(
                f"exact=false goes with federation.weights: examples, got {weights}; its probabilities are unknown, so "
                "that another mean cannot be put right"
            )

    def draw(self, state: State, ask: Ask) -> Draw:
        candidates = ask.candidates
        sizes = ask.sizes[candidates].astype(float)
        weights = np.ones(ask.clients)
        if not self.exact:
            return Draw(race(ask, "weighted", candidates, sizes, ask.size), NOBODY, weights)
        pi = capped(sizes, ask.size)
        count = float(min(ask.size, len(candidates)))
        weights[candidates] = count * ask.shares_of(candidates) / pi
        by_examples = ask.target is not None and np.array_equal(ask.target, ask.sizes / ask.sizes.sum())
        if by_examples and (pi < 1).all() and len(candidates) == ask.clients:
            weights[:] = 1.0  # S p_i / pi_i, which is 1 but for rounding
        return Draw(systematic(ask, "weighted", candidates, pi), NOBODY, weights, count)


@dataclass(frozen=True)
class CyclicSampler(Sampler):
    """The next S clients of an order, again and again.

    order: the clients' numbers (`id`), one random order for all passes (`shuffled`), or a new one for each pass
    (`reshuffled`), whose last cohort may be smaller.
    """

    gives_spares: ClassVar[bool] = True

    order: Literal["id", "shuffled", "reshuffled"] = "shuffled"

    def start(self, clients: int, cohort: int) -> State:
        return {"cursor": np.zeros(1, dtype=np.int64)}

    def _pass(self, ask: Ask, number: int) -> np.ndarray:
        """(N,) the clients in the order of a pass."""
        if self.order == "id":
            return np.arange(ask.clients)
        return philox(ask.seed, "turns", *([number] if self.order == "reshuffled" else [])).permutation(ask.clients)

    def _walk(self, ask: Ask, begin: int) -> tuple[np.ndarray, np.ndarray]:
        """(the eligible clients from this place of the order on, their places), a pass at most."""
        number, place = divmod(begin, ask.clients)
        order, places = self._pass(ask, number)[place:], begin + np.arange(ask.clients - place)
        if self.order != "reshuffled" and place:
            order = np.concatenate([order, self._pass(ask, number + 1)[:place]])
            places = begin + np.arange(ask.clients)
        if ask.eligible is not None:
            there = np.isin(order, ask.eligible)
            order, places = order[there], places[there]
        return order, places

    def draw(self, state: State, ask: Ask) -> Draw:
        begin = int(state["cursor"][0])
        order, places = self._walk(ask, begin)
        if not len(order) and self.order == "reshuffled":  # nobody is left of this pass
            begin = (begin // ask.clients + 1) * ask.clients
            order, places = self._walk(ask, begin)
        drawn = order[: ask.size]
        end = int(places[len(drawn) - 1]) + 1 if len(drawn) else begin
        spares = order[ask.size : ask.size + ask.spares]
        return Draw(np.sort(drawn), np.sort(spares), note={"cursor": np.array([end], dtype=np.int64)})

    def told(self, state: State, ask: Ask, draw: Draw, feedback: Feedback) -> State:
        return dict(draw.note)


@dataclass(frozen=True)
class PowerOfChoice(Sampler):
    """Of `d` candidates those S with the largest losses take part. The mean is plain, because the bias is the point.

    d: the number of candidates, from S to N; candidates: whether they are drawn `uniform` or in proportion to their
    numbers of `examples`; loss: the mean of the losses that a client trains on, of the model on `all` of its rows, on a
    `batch` of `rows` of them, or in the steps of its `last` visit, which costs no traffic; rows: of a batch.
    """

    has_probabilities: ClassVar[bool] = False

    d: int
    candidates: Literal["uniform", "examples"] = "examples"
    loss: Literal["all", "batch", "last"] = "all"
    rows: int = 32

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise ValueError(f"rows >= 1 must hold, got {self.rows}; raise it")

    def check(self, clients: int, cohort: int, weights: str) -> None:
        if not cohort <= self.d <= clients:
            raise ValueError(f"cohort <= d <= clients must hold, got cohort={cohort}, d={self.d}, clients={clients}")

    def start(self, clients: int, cohort: int) -> State:
        return {"loss": np.full(clients, np.inf)} if self.loss == "last" else {}

    def draw(self, state: State, ask: Ask) -> Draw:
        everyone = ask.candidates
        if self.candidates == "uniform":
            candidates = uniform_draw(ask, "cohort", everyone, self.d)
        else:
            candidates = race(ask, "candidates", everyone, ask.sizes[everyone].astype(float), self.d)
        weights = np.ones(ask.clients)
        if len(candidates) <= ask.size:
            return Draw(candidates, NOBODY, weights)
        if self.loss == "last":
            losses = state["loss"][candidates]
        else:
            losses = ask.probe(candidates, self.rows if self.loss == "batch" else None)
        ties = ask.uniform("tie", candidates)
        best = np.lexsort((candidates, ties, -losses))[: ask.size]
        return Draw(np.sort(candidates[best]), NOBODY, weights)

    def told(self, state: State, ask: Ask, draw: Draw, feedback: Feedback) -> State:
        if self.loss != "last":
            return state
        loss = state["loss"].copy()
        loss[feedback.clients] = feedback.loss
        return {"loss": loss}

"""Epsilon of Gaussian releases of a sum over clients, by the package dp-accounting.

Every figure is a pure function of its arguments: an accountant is made anew for each of them. A resumed run therefore
reports the same bits as one that was never interrupted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from importlib import metadata
from typing import Any, Literal, NamedTuple

from ..errors import ConfigError

Adjacency = Literal["add_or_remove", "zero_out", "replace"]
"""The difference between two federations that an observer can hardly tell apart: one client is added or removed; the
messages of one client become zeros; the data of one client become any other data."""
Kind = Literal["rdp", "pld"]
"""Renyi divergences, or privacy loss distributions, which are tighter."""

RELATIONS = {"add_or_remove": "ADD_OR_REMOVE_ONE", "zero_out": "REPLACE_SPECIAL", "replace": "REPLACE_ONE"}
"""Adjacencies by the names of dp-accounting."""
GRID = 1e-3
"""The width of the grid on which privacy losses are discretised. A finer grid lowers epsilon by about 0.001."""
LEAST_NOISE = 0.05
"""The least noise multiplier that calibration tries; accountants fail below it."""
MOST_NOISE = 1e7
PRECISION = 1e-5
"""The relative precision of a calibrated noise multiplier."""


class Releases(NamedTuple):
    """`times` releases of the sum over the clients.

    noise: the standard deviation over the sensitivity of the sum. rate: every client is in a release with this
    probability, independently of others. subset: (S, N), a release is of S of the N clients, drawn without replacement.
    Without `rate` and `subset` every client is in every release.
    """

    times: int
    noise: float
    rate: float | None = None
    subset: tuple[int, int] | None = None


def library() -> Any:
    """The package dp-accounting. Raises ConfigError if it is not installed."""
    try:
        import dp_accounting.pld
        import dp_accounting.rdp
    except ImportError as error:
        raise ConfigError(
            f'privacy: accounting needs the package dp-accounting, got {error}; pip install "fedfleet[privacy]"'
        ) from None
    return dp_accounting


def library_version() -> str:
    return metadata.version("dp-accounting")


def event(releases: Releases) -> Any:
    """The releases as an event of dp-accounting."""
    da = library()
    if releases.rate is None and releases.subset is None:
        return da.GaussianDpEvent(releases.noise / math.sqrt(releases.times))  # one release with as much information
    once = da.GaussianDpEvent(releases.noise)
    if releases.rate is not None:
        once = da.PoissonSampledDpEvent(releases.rate, once)
    elif releases.subset is not None:
        cohort, clients = releases.subset
        once = da.SampledWithoutReplacementDpEvent(clients, cohort, once)
    return da.SelfComposedDpEvent(once, releases.times)


def accountant(kind: Kind, adjacency: Adjacency) -> Any:
    """A new accountant of dp-accounting."""
    da = library()
    relation = getattr(da.NeighboringRelation, RELATIONS[adjacency])
    if kind == "rdp":
        return da.rdp.RdpAccountant(neighboring_relation=relation)
    return da.pld.PLDAccountant(relation, value_discretization_interval=GRID)


def epsilon(releases: Releases, delta: float, kind: Kind, adjacency: Adjacency) -> float:
    """Epsilon of the releases at delta; 0 for no release. Raises ConfigError if the accountant has no bound."""
    if releases.times == 0:
        return 0.0
    if releases.noise == 0:
        return math.inf
    if kind == "rdp":
        orders, once = divergences(releases._replace(times=1), adjacency)
        return float(library().rdp.rdp_privacy_accountant.compute_epsilon(orders, releases.times * once, delta)[0])
    with quiet():
        return float(composed(releases, kind, adjacency).get_epsilon(delta))


@lru_cache(64)
def divergences(once: Releases, adjacency: Adjacency) -> tuple[Any, Any]:
    """(orders, the Renyi divergences of one release). For samples without replacement they take 0.15 s."""
    with quiet():
        made = composed(once, "rdp", adjacency)
    return made.orders, made.rdp


def composed(releases: Releases, kind: Kind, adjacency: Adjacency) -> Any:
    """An accountant that has the releases. Raises ConfigError if it has no bound for them."""
    made, spent = accountant(kind, adjacency), event(releases)
    if not made.supports(spent):
        raise ConfigError(
            f"privacy: accountant {kind} has no bound for these releases, got {spent}; choose accountant: rdp"
        )
    return made.compose(spent)


class Sequence:
    """Epsilon after every round where the noise differs from round to round.

    Rounds are composed one after another from the first, also in a resumed run, so that the bits are the same.
    """

    def __init__(self, releases: Callable[[int], Releases], delta: float, kind: Kind, adjacency: Adjacency) -> None:
        """releases: what round t (from 1) releases."""
        self.releases, self.delta = releases, delta
        self.start = partial(accountant, kind, adjacency)
        self.made, self.rounds = self.start(), 0

    def epsilon(self, t: int) -> float:
        """Epsilon of rounds 1 to t."""
        if t < self.rounds:
            self.made, self.rounds = self.start(), 0
        with quiet():
            while self.rounds < t:
                self.rounds += 1
                once = self.releases(self.rounds)
                if once.noise == 0:
                    return math.inf
                self.made.compose(event(once))
            return float(self.made.get_epsilon(self.delta)) if t else 0.0


def calibrate(target: float, epsilon_of: Callable[[float], float]) -> float:
    """The least noise multiplier, within `PRECISION`, whose epsilon is at most `target`; epsilon_of: a decreasing
    function of the multiplier. Raises ValueError if there is none within reach."""
    from scipy.optimize import brentq

    known: dict[float, float] = {}

    def excess(log_z: float) -> float:
        known[log_z] = math.log(max(epsilon_of(math.exp(log_z)), 1e-300) / target)
        return known[log_z]

    high = 0.0
    while excess(high) > 0:
        high += math.log(2)
        if high > math.log(MOST_NOISE):
            raise ValueError(f"no noise below {MOST_NOISE:g} reaches epsilon={target}; raise epsilon or delta")
    low = high - math.log(2)
    while low > math.log(LEAST_NOISE) and excess(low) <= 0:
        low, high = low - math.log(2), low
    low = max(low, math.log(LEAST_NOISE))
    if excess(low) > 0:
        brentq(excess, low, high, xtol=PRECISION / 4)
        high = min(log_z for log_z, over in known.items() if over <= 0)
        while excess(high - PRECISION) <= 0:  # the last step may have come from the other side
            high -= PRECISION
        return math.exp(high)
    return math.exp(low)


def last_round(budget: float, rounds: int, epsilon_of: Callable[[int], float]) -> int:
    """The last of `rounds` rounds after which epsilon is at most `budget`; 0 if there is none. epsilon_of: t -> epsilon
    of the first t rounds."""
    low, high = 0, rounds
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if epsilon_of(middle) <= budget else (low, middle - 1)
    return low


@contextmanager
def quiet() -> Iterator[None]:
    """A context without the warnings that dp-accounting logs about single orders, which it then leaves out."""
    from absl import logging

    before = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        logging.set_verbosity(before)

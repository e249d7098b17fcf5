"""When clients are online, as pure functions of the virtual time."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np

from .contract import Availability, keys, nonnegative, normal, positive, probability, require, uniform
from .traces import Assign, Sessions, read_sessions, rows_of

FURTHEST = 2_000
"""The number of slots, cycles or days that are searched for the next session, and for the end of one. A client that is
offline or online for longer counts as offline or online for ever."""
HOUR = 3600.0
SHORTEST = 0.001
"""Seconds of the shortest slot."""


def times(clients: np.ndarray, t: float | np.ndarray) -> np.ndarray:
    """(c,) float64: the time for each client."""
    return np.broadcast_to(np.asarray(t, dtype=float), len(clients)).copy()


@dataclass(frozen=True)
class Always(Availability):
    """Every client is online at all times."""

    always: ClassVar[bool] = True

    def online(self, seed: int, clients: np.ndarray, t: float | np.ndarray) -> np.ndarray:
        return np.ones(len(clients), dtype=bool)

    def until(self, seed: int, clients: np.ndarray, t: float | np.ndarray) -> np.ndarray:
        return np.full(len(clients), np.inf)

    def next(self, seed: int, clients: np.ndarray, t: float | np.ndarray) -> np.ndarray:
        return times(clients, t)


@dataclass(frozen=True)
class Slots(Availability):
    """Time is cut into slots of `slot` seconds. In each of them a client is online with a probability, independently of
    other slots: chance(seed, clients (c,), the number of a slot for each (c,)) is (c,)."""

    slot: float
    chance: Callable[[int, np.ndarray, np.ndarray], np.ndarray]

    def __post_init__(self) -> None:
        require(self.slot >= SHORTEST, f"slot >= {SHORTEST:g} must hold, got {self.slot}; choose longer slots")

    def _in_slot(self, seed: int, clients: np.ndarray, number: np.ndarray) -> np.ndarray:
        return uniform(keys(seed, "online", clients, number)) < self.chance(seed, clients, number)

    def _number(self, clients: np.ndarray, t: float | np.ndarray) -> np.ndarray:
        return np.floor(times(clients, t) / self.slot).astype(np.int64)

    def online(self, seed: int, clients: np.ndarray, t: float | np.ndarray) -> np.ndarray:
        return self._in_slot(seed, clients, self._number(clients, t))

    def _first(self, seed: int, clients: np.ndarray, t: float | np.ndarray, online: bool) -> np.ndarray:
        """(c,) t for the clients that are `online` (or not), else the start of the first slot in which they are."""
        start, number, found = times(clients, t), self._number(clients, t), np.full(len(clients), np.inf)
        waiting = np.arange(len(clients))
        for _ in range(FURTHEST):
            there = self._in_slot(seed, clients[waiting], number[waiting]) == online
            found[waiting[there]] = start[waiting[there]]
            waiting = waiting[~there]
            if not len(waiting):
                break
            number[waiting] += 1
            start[waiting] = number[waiting] * self.slot
        return found

    def until(self, seed: int, clients: np.ndarray, t: float | np.ndarray) -> np.ndarray:
        return self._first(seed, clients, t, False)

    def next(self, seed: int, clients: np.ndarray, t: float | np.ndarray) -> np.ndarray:
        return self._first(seed, clients, t, True)


def bernoulli(p: float, slot: float = 600.0) -> Slots:
    """A coin for each client and slot of time. p: the probability of being online; slot: seconds."""
    probability(p=p)
    return Slots(slot, lambda seed, clients, number: np.full(len(clients), p))


def sine(beta: float = 0.1, slot: float = HOUR) -> Slots:
    """Slots whose probability rises and falls: q_i (0.4 sin(2 pi s / 24) + 0.5) in slot s, where q_i is log-normal
    with sigma = -ln(1 - beta) below a cap of 1, which one client in 1,000 would exceed. beta: how far clients differ;
    slot: seconds."""
    require(0 <= beta < 1, f"0 <= beta < 1 must hold, got {beta}; lower it")

    def chance(seed: int, clients: np.ndarray, number: np.ndarray) -> np.ndarray:
        sigma = -math.log1p(-beta)
        q = np.minimum(1.0, np.exp(sigma * (normal(keys(seed, "online share", clients)) - 3.09)))
        return q * (0.4 * np.sin(2 * np.pi * number / 24) + 0.5)

    return Slots(slot, chance)


@dataclass(frozen=True)
class Cycles(Availability):
    """Time is cut into cycles, which may have a length of their own for each client. A cycle has one session at most,
    which lies within the cycle or reaches into the next one.

    cycle: (seed, clients (c,), times (c,)) -> (c,) the number of the cycle that contains each time. session: (seed,
    clients (c,), numbers of cycles (c,)) -> ((c,) starts, (c,) ends) of their sessions; both infinite for none.
    """

    cycle: Callable[[int, np.ndarray, np.ndarray], np.ndarray]
    session: Callable[[int, np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]

    def online(self, seed: int, clients: np.ndarray, t: float | np.ndarray) -> np.ndarray:
        now, found = times(clients, t), np.zeros(len(clients), dtype=bool)
        number = self.cycle(seed, clients, now)
        for shift in (-1, 0, 1):
            begins, ends = self.session(seed, clients, number + shift)
            found |= (begins <= now) & (now < ends)
        return found

    def until(self, seed: int, clients: np.ndarray, t: float | np.ndarray) -> np.ndarray:
        end = times(clients, t)
        number, growing = self.cycle(seed, clients, end) - 1, np.arange(len(clients))
        for turn in range(FURTHEST):  # sessions that touch each other are one
            begins, ends = self.session(seed, clients[growing], number[growing])
            joined = (begins <= end[growing]) & (end[growing] < ends)
            end[growing[joined]] = ends[joined]
            growing = growing[joined | (turn < 2)]  # the cycles around t are looked at in any case
            if not len(growing):
                return end
            number[growing] += 1
        end[growing] = np.inf
        return end

    def next(self, seed: int, clients: np.ndarray, t: float | np.ndarray) -> np.ndarray:
        now = times(clients, t)
        found, number = np.where(self.online(seed, clients, now), now, np.inf), self.cycle(seed, clients, now)
        waiting = np.flatnonzero(~np.isfinite(found))
        for _ in range(FURTHEST):
            if not len(waiting):
                break
            begins = self.session(seed, clients[waiting], number[waiting])[0]
            later = np.isfinite(begins) & (begins > now[waiting])
            found[waiting[later]] = begins[later]
            waiting = waiting[~later]
            number[waiting] += 1
        return found


def sessions(length: float, pause: float, spread: float = 0.0) -> Cycles:
    """Sessions and pauses. length: the mean seconds of a session; pause: the mean seconds of a pause; spread: the
    standard deviation of the logarithms of a client's own means, and of each session's length."""
    positive(length=length, pause=pause)
    nonnegative(spread=spread)

    def own(seed: int, clients: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(mean length of a session, length of a cycle, phase) of each client, (c,)."""
        on = length * np.exp(spread * normal(keys(seed, "session on", clients)))
        whole = on + pause * np.exp(spread * normal(keys(seed, "session off", clients)))
        return on, whole, uniform(keys(seed, "session phase", clients)) * whole

    def cycle(seed: int, clients: np.ndarray, t: np.ndarray) -> np.ndarray:
        _, whole, phase = own(seed, clients)
        return np.floor((t + phase) / whole).astype(np.int64)

    def session(seed: int, clients: np.ndarray, number: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        on, whole, phase = own(seed, clients)
        z = normal(keys(seed, "session length", clients, number))
        lasts = np.minimum(whole, on * np.exp(spread * z - spread**2 / 2))
        start = number * whole - phase + uniform(keys(seed, "session", clients, number)) * (whole - lasts)
        # A session that fills its cycle ends where the next cycle starts, without a gap by rounding.
        return start, np.where(lasts < whole, start + lasts, (number + 1) * whole - phase)

    return Cycles(cycle, session)


def diurnal(
    p: float = 0.8,
    start: float = 22.5,
    start_sigma: float = 1.5,
    hours: float = 7.0,
    hours_sigma: float = 2.0,
    zones: list[list[float]] | None = None,
) -> Cycles:
    """One session in a night, which lasts at least half an hour and at most twelve hours. p: the probability of a
    session in a night; start: the mean hour at which it begins in the client's zone; start_sigma: the standard
    deviation in hours; hours: the mean length; hours_sigma: its standard deviation; zones: a list of [share, hours from
    the virtual clock's zone] whose shares sum to 1."""
    probability(p=p)
    nonnegative(start_sigma=start_sigma, hours_sigma=hours_sigma)
    positive(hours=hours)
    if zones is not None:
        good = bool(zones) and all(len(zone) == 2 and zone[0] >= 0 for zone in zones)
        require(good, f"zones must be a list of [share, hours], got {zones!r}; give both")
        total = sum(zone[0] for zone in zones)
        require(abs(total - 1) < 1e-6, f"the shares of zones must sum to 1, got {total:g}; change one")

    def midnight(seed: int, clients: np.ndarray) -> np.ndarray:
        """(c,) seconds from the virtual clock's midnight to a client's."""
        if zones is None:
            return np.zeros(len(clients))
        shares, ahead = np.array(zones, dtype=float).T
        place = np.searchsorted(np.cumsum(shares)[:-1], uniform(keys(seed, "zone", clients)), "right")
        return -ahead[place] * HOUR

    def cycle(seed: int, clients: np.ndarray, t: np.ndarray) -> np.ndarray:
        noon = t - midnight(seed, clients) - 12 * HOUR  # cycles go from noon to noon, so that a night is whole
        return np.floor(noon / (24 * HOUR)).astype(np.int64)

    def session(seed: int, clients: np.ndarray, number: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        comes = uniform(keys(seed, "night", clients, number)) < p
        hour = start + start_sigma * normal(keys(seed, "night start", clients, number))
        lasts = np.clip(hours + hours_sigma * normal(keys(seed, "night hours", clients, number)), 0.5, 12)
        starts = midnight(seed, clients) + (number * 24 + np.clip(hour, 12, 35.5)) * HOUR
        return np.where(comes, starts, np.inf), np.where(comes, starts + lasts * HOUR, np.inf)

    return Cycles(cycle, session)


@dataclass(frozen=True)
class Trace(Availability):
    """Sessions from a Parquet file, see the guide to fleets for its columns.

    file: its path; assign: how the clients of the file are assigned to those of the run: by number, by the number
    modulo how many there are, or each client has one at random.
    """

    file: str
    assign: Assign = "random"

    def __post_init__(self) -> None:
        self.sessions  # noqa: B018 a file that cannot be used is refused now

    @cached_property
    def sessions(self) -> Sessions:
        return read_sessions(self.file)

    def check(self, clients: int) -> None:
        self._entries(0, np.arange(clients))

    def _entries(self, seed: int, clients: np.ndarray) -> np.ndarray:
        return rows_of(self.sessions.clients, len(self.sessions.clients), self.assign, seed, clients)

    def _find(self, seed: int, clients: np.ndarray, t: float | np.ndarray) -> tuple[np.ndarray, ...]:
        """((c,) the number of the first session that ends after t, (c,) whether there is one, (c,) the end of the
        client's sessions, (c,) the start of the period that contains t)."""
        found, now, entries = self.sessions, times(clients, t), self._entries(seed, clients)
        base = np.zeros(len(clients))
        if found.period is not None:
            base = np.floor(now / found.period) * found.period
            now = now - base
        low, high = found.offsets[entries], found.offsets[entries + 1]
        last = high.copy()
        while (low < high).any():  # a binary search in each client's part of the table
            middle = (low + high) // 2
            after = found.end[np.minimum(middle, len(found.end) - 1)] > now
            active = low < high
            high = np.where(active & after, middle, high)
            low = np.where(active & ~after, middle + 1, low)
        return low, low < last, found.offsets[entries], base

    def online(self, seed: int, clients: np.ndarray, t: float | np.ndarray) -> np.ndarray:
        at, there, _, base = self._find(seed, clients, t)
        begin = self.sessions.begin[np.minimum(at, len(self.sessions.begin) - 1)] + base
        return there & (begin <= times(clients, t))

    def until(self, seed: int, clients: np.ndarray, t: float | np.ndarray) -> np.ndarray:
        at, _, first, base = self._find(seed, clients, t)
        end = self.sessions.end[np.minimum(at, len(self.sessions.end) - 1)]
        if self.sessions.period is not None:  # a session may go on with the first one of the next period
            period, following = self.sessions.period, self.sessions.end[first]
            over = np.where(following == period, np.inf, period + following)
            end = np.where((end == period) & (self.sessions.begin[first] == 0), over, end)
        return np.where(self.online(seed, clients, t), end + base, times(clients, t))

    def next(self, seed: int, clients: np.ndarray, t: float | np.ndarray) -> np.ndarray:
        at, there, first, base = self._find(seed, clients, t)
        begin = self.sessions.begin[np.minimum(at, len(self.sessions.begin) - 1)] + base
        period = np.inf if self.sessions.period is None else self.sessions.period
        later = np.where(there, begin, self.sessions.begin[first] + base + period)
        return np.maximum(later, times(clients, t))

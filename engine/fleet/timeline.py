"""The timeline of an asynchronous run: which client is dispatched when, from which version, and which update uses it.

A job is one dispatch of a client: it begins from version v of the model and arrives after the client's virtual
duration. No duration depends on weights or losses, so the timeline is worked out without training anything. It is a
pure function of the configuration: a run that is resumed goes through it again from the beginning.

    refill    fills free slots with clients that are online, idle, and were not dispatched from this version before
    arrival   frees a slot; the job's staleness is the number of updates since it was dispatched; it joins the buffer
    update    once the buffer has M jobs: the version goes up by 1
"""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_left, bisect_right, insort
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from ...workloads import counted
from ..config.schema import Asynchronous
from ..errors import ConfigError
from .contract import keys, uniform
from .visits import Fleet, VisitTimes

LOSS, ARRIVAL, WAKE, START = range(4)
"""Kinds of events, in the order in which they are dealt with at equal times."""
MOST_MISSED = 10_000
"""The largest number of jobs in a row that are lost or too stale. After it no further update is expected."""
DRAWS = 1024
"""How many draws are prepared at once."""
UNUSED = -1
"""The target of a job whose result no update uses."""


@dataclass(eq=False)
class Job:
    """One dispatch of a client.

    version: that it begins from. refill: the number of the draw that chose it, from 1. visit: how many of the client's
    results arrived before and were not discarded, which is where its stream of batches goes on. steps: its local steps.
    start: when it is dispatched. end: when it arrives or is lost. duration, compute: the seconds of its whole visit if
    it is not lost, and those of its local steps. target: the number of the update that uses it, UNUSED if none does;
    None while it is not known. staleness: the updates between version and end. before: the client's
    job before this one whose result is used, if its update came after this job's version.
    """

    client: int
    version: int
    refill: int
    visit: int
    steps: int
    start: float
    end: float
    duration: float
    compute: float
    lost: bool
    target: int | None = None
    staleness: int = 0
    before: Job | None = None


@dataclass
class Buffer:
    """The results of one update of the server, and what has happened since the update before."""

    jobs: list[Job] = field(default_factory=list)
    """Whose results the update uses, in the order of their arrival."""
    unused: list[Job] = field(default_factory=list)
    """That were lost, or discarded because they were too stale."""
    dispatched: int = 0
    """How many jobs were dispatched."""
    waited: float = 0.0
    """The seconds in which no client was in flight."""
    clock: float = 0.0
    """When the update happens."""
    flight: int = 0
    """How many jobs are in flight then."""
    versions: int = 0
    """From how many versions these began."""

    @property
    def discarded(self) -> int:
        """How many jobs arrived and were too stale."""
        return sum(not job.lost for job in self.unused)


class Timeline:
    """Works out the timeline as far as it is asked for."""

    def __init__(self, pace: Asynchronous, seed: int, clients: int, concurrency: int, fleet: Fleet) -> None:
        """clients: N. concurrency: C, the number of slots."""
        self.pace, self.seed, self.clients, self.concurrency, self.fleet = pace, seed, clients, concurrency, fleet
        self.clock, self.version, self.refills = 0.0, 0, 0
        self.draws = draws(seed)
        self.events: list[tuple[float, int, float, int]] = []  # (time, kind, order among ties, client)
        self.flight: dict[int, Job] = {}  # client -> its job
        self.buffer = Buffer()  # of the next update
        self.asked: set[int] = set()  # the clients that were dispatched from this version, if `once`
        self.excluded: list[int] = []  # the clients in `flight` or `asked`, ascending
        self.visits: dict[int, int] = defaultdict(int)
        self.newest: dict[int, Job] = {}  # client -> its last job that an update uses
        self.updates: dict[int, Buffer] = {}  # number -> what it uses
        self.jobs: dict[int, list[Job]] = defaultdict(list)  # version -> jobs that were dispatched from it
        self.undecided: dict[int, int] = defaultdict(int)  # version -> its jobs that have no target yet
        self.missed = 0  # jobs that were lost or discarded since the last one that was used
        self.outcomes = None if fleet.remembered is None else self._outcomes(fleet.remembered)  # of all clients
        everyone = np.arange(clients)
        self.fitting = None if fleet.all_eligible else everyone[fleet.fits(everyone)]
        if pace.starts == "rate":
            heapq.heappush(self.events, (0.0, START, 0.0, -1))
        else:
            self._refill()

    # --- what is asked for ------------------------------------------------------------------------------------------
    def update(self, number: int) -> Buffer:
        """The update with this number, from 1. Raises ConfigError if the run cannot go on to it."""
        while self.version < number:
            if not self._step():
                raise ConfigError(f"federation.pace: {self._why_no_update()}")
        return self.updates[number]

    def of_version(self, version: int) -> list[Job]:
        """All jobs that are dispatched from a version and that some update uses, in the order of their dispatch."""
        while self.version <= version or self.undecided.get(version):
            if not self._step():
                break
        return [job for job in self.jobs.get(version, ()) if job.target is not None and job.target != UNUSED]

    def forget(self, version: int) -> None:
        """Nobody asks for the jobs of this version, or the update that it is from, again."""
        self.jobs.pop(version, None)
        self.undecided.pop(version, None)
        self.updates.pop(version, None)

    def _why_no_update(self) -> str:
        if self.missed > MOST_MISSED:
            return (
                f"no update will come after update {self.version}, because {MOST_MISSED:,} clients in a row were lost "
                f"or too stale (until second {self.clock:,.0f}); raise its deadline or staleness, or lower "
                "systems.dropout, or choose another availability"
            )
        because = "; choose another availability"
        if self.pace.once:
            because += f", or lower federation.pace.buffer: {self.pace.buffer} of them must arrive from one version"
        return (
            f"no client is in flight after update {self.version} (second {self.clock:,.0f}), and none will come that "
            f"is online and idle{because}"
        )

    # --- events -----------------------------------------------------------------------------------------------------
    def _step(self) -> bool:
        """Deal with everything that happens at the next point in time. False if nothing will happen any more."""
        if not self.events or self.missed > MOST_MISSED:
            return False
        if not self.flight:
            self.buffer.waited += self.events[0][0] - self.clock
        self.clock = self.events[0][0]
        group = []
        while self.events and self.events[0][0] == self.clock:
            group.append(heapq.heappop(self.events))
        starts = 0
        for _, kind, _, client in group:  # in the order of the heap: kind, then ties
            if kind == LOSS:
                self._discard(self._end_flight(client))
            elif kind == ARRIVAL:
                self._arrive(client)
            starts += kind == START
        if self.pace.starts == "slots":
            self._refill()
        for _ in range(starts):
            self._start()
        return True

    def _end_flight(self, client: int) -> Job:
        """The job of a client that is no longer in flight."""
        job = self.flight.pop(client)
        job.staleness = self.version - job.version
        if client not in self.asked:
            self._make_eligible(client)
        return job

    def _make_eligible(self, client: int) -> None:
        """The client may be dispatched again."""
        del self.excluded[bisect_left(self.excluded, client)]

    def _arrive(self, client: int) -> None:
        job = self._end_flight(client)
        if self.pace.staleness is not None and job.staleness > self.pace.staleness:
            return self._discard(job)
        self.buffer.jobs.append(job)
        self.missed = 0
        job.target = self.version + 1
        self.undecided[job.version] -= 1
        before = self.newest.get(client)
        if before is not None and (before.target or 0) > job.version:
            job.before = before
        self.newest[client] = job
        self.visits[client] += 1
        if len(self.buffer.jobs) == self.pace.buffer:
            self._update()

    def _discard(self, job: Job) -> None:
        """No update uses the job, and its client may be dispatched from this version again."""
        job.target = UNUSED
        self.buffer.unused.append(job)
        self.missed += 1
        self.undecided[job.version] -= 1
        if job.client in self.asked:
            self.asked.remove(job.client)
            self._make_eligible(job.client)

    def _update(self) -> None:
        self.version += 1
        if self.asked:
            self.asked.clear()
            self.excluded = sorted(self.flight)
        buffer, self.buffer = self.buffer, Buffer()
        buffer.clock, buffer.flight = self.clock, len(self.flight)
        buffer.versions = len({job.version for job in self.flight.values()})
        self.updates[self.version] = buffer

    # --- dispatches -------------------------------------------------------------------------------------------------
    def _refill(self) -> None:
        free = self.concurrency - len(self.flight)
        if free <= 0 or (free < self.pace.open and self.flight):
            return
        clients = self._drawn(free)
        if len(clients):
            self._dispatch(clients)
        if len(clients) < free:
            self._wake()

    def _start(self) -> None:
        """One start of `starts: rate`, which come at equal distances whatever is in flight."""
        clients = self._drawn(1)
        if len(clients):
            self._dispatch(clients)
        elif not self.flight and self._nobody_will_come():
            return
        heapq.heappush(self.events, (self.clock + self.pace.gap, START, 0.0, -1))

    def _nobody_will_come(self) -> bool:
        """Whether no client with enough memory will ever be online again."""
        return self.fitting is not None and not np.isfinite(self.fleet.next_online(self.fitting, self.clock)).any()

    def _drawn(self, most: int) -> np.ndarray:
        """Up to `most` clients in ascending order, drawn from those that are online, have enough memory, are idle, and
        were not dispatched from this version if `once`."""
        if self.fitting is None:
            eligible, total = None, self.clients - len(self.excluded)
        else:
            idle = np.setdiff1d(self.fitting, np.array(self.excluded, dtype=np.int64), assume_unique=True)
            eligible = idle[self.fleet.online(idle, self.clock)]
            total = len(eligible)
        count = min(most, total)
        if not count:
            return np.zeros(0, dtype=np.int64)
        self.refills += 1
        positions = drawn_positions(next(self.draws), total, count)
        return not_excluded(self.excluded, positions) if eligible is None else eligible[positions]

    def _dispatch(self, clients: np.ndarray) -> None:
        """Dispatch these clients (c,), in ascending order, now."""
        visited = [self.visits.get(client, 0) for client in clients.tolist()]
        if self.outcomes is None:
            visits = self.fleet.visits(clients, self.refills, np.array(visited, dtype=np.int64), self.clock)
            rows = zip(*(column.tolist() for column in self._outcomes(visits)), strict=True)
        else:  # mostly of one client, for which this takes a fifth of the time
            rows = zip(*([column.item(client) for client in clients] for column in self.outcomes), strict=True)
        ties = [0.0] * len(clients)
        if self.pace.ties == "counted":
            ties = uniform(keys(self.seed, "tie", clients, self.refills)).tolist()
        for client, visit, tie, row in zip(clients.tolist(), visited, ties, rows, strict=True):
            steps, seconds, duration, compute, lost = row
            end = self.clock + seconds
            job = Job(client, self.version, self.refills, visit, steps, self.clock, end, duration, compute, lost)
            self.flight[client] = job
            self.jobs[self.version].append(job)
            heapq.heappush(self.events, (end, LOSS if lost else ARRIVAL, tie, client))
            insort(self.excluded, client)
            if self.pace.once:
                self.asked.add(client)
        self.undecided[self.version] += len(clients)
        self.buffer.dispatched += len(clients)

    def _outcomes(self, visits: VisitTimes) -> tuple[np.ndarray, ...]:
        """What becomes of these visits, (c,) each: the local steps; the seconds until the client arrives or is lost;
        those of the whole visit and those of its local steps, if it is not lost; whether it is lost."""
        ends, lost = visits.duration, ~visits.arrives
        ends = np.where(lost, visits.lost, ends)
        if self.pace.deadline is not None:
            late = ends > self.pace.deadline
            ends, lost = np.where(late, self.pace.deadline, ends), lost | late
        return visits.steps, ends, visits.duration, visits.compute, lost

    def _wake(self) -> None:
        """Have the slots filled again when the next idle client comes online."""
        if self.fitting is None:
            return
        idle = np.setdiff1d(self.fitting, np.array(list(self.flight), dtype=np.int64))
        times = self.fleet.next_online(idle, self.clock)
        times = times[(times > self.clock) & np.isfinite(times)]
        wake = (float(times.min()) if len(times) else math.inf, WAKE, 0.0, -1)
        if len(times) and wake not in self.events:
            heapq.heappush(self.events, wake)


def draws(seed: int) -> Iterator[np.random.Generator]:
    """The generator of each refill, from 1, which is that of the cohort of the round with this number. It may be used
    until the next one is asked for."""
    for first in itertools.count(1, DRAWS):
        yield from counted.numpy_generators(counted.key(seed, "cohort", np.arange(first, first + DRAWS)))


def drawn_positions(random: np.random.Generator, total: int, count: int) -> np.ndarray:
    """(count,) distinct numbers below `total` in ascending order: the draw of a synchronous round."""
    if count == total:
        return np.arange(count)
    if count == 1:  # which most arrivals ask for: the same number as by `choice`, in a fifth of the time
        return np.array([int(random.integers(total))])
    return np.sort(random.choice(total, count, replace=False, shuffle=False).astype(np.int64))


def not_excluded(excluded: list[int], positions: np.ndarray) -> np.ndarray:
    """(count,) the clients at these positions (count,) of all clients without those that are `excluded`. Everything is
    in ascending order. It takes no time for the clients that are not excluded."""
    if len(positions) == 1:
        position = int(positions[0])
        return positions + bisect_right(range(len(excluded)), position, key=lambda i: excluded[i] - i)
    without = np.array(excluded, dtype=np.int64)
    return positions + np.searchsorted(without - np.arange(len(without)), positions, side="right")


def staleness_weight(pace: Asynchronous, staleness: int) -> float:
    """s(tau): the weight of a result that is this stale, 1 for a fresh one where `relative_to` is 0."""
    return _weight(pace, staleness) / _weight(pace, pace.relative_to)


def _weight(pace: Asynchronous, staleness: float) -> float:
    if pace.weight == "constant":
        return 1.0
    if pace.weight == "polynomial":
        return float((1.0 + staleness) ** -pace.a)
    if staleness <= pace.b:
        return 1.0
    return pace.c if pace.weight == "threshold" else 1.0 / (pace.slope * (staleness - pace.b) + 1.0)

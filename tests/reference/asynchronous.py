"""A slow reference of asynchronous optimisation: an event loop in plain Python, which shares no code with the engine.

Durations are a function (client, refill, visit) -> (seconds, whether the job is lost). Draws are a function (number of
the refill, eligible clients ascending, how many) -> clients ascending. Nothing here is efficient: all lists are
searched from the beginning.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

Duration = Callable[[int, int, int], tuple[float, bool]]
Drawing = Callable[[int, Sequence[int], int], Sequence[int]]


@dataclass
class ReferenceJob:
    client: int
    version: int
    refill: int
    visit: int
    start: float
    end: float
    lost: bool


@dataclass
class Reference:
    """The state of the algorithm. n: clients; slots: C; buffer_size: M; most: the largest staleness, None for any."""

    n: int
    slots: int
    buffer_size: int
    duration: Duration
    draw: Drawing
    most: int | None = None
    opening: int = 1
    once: bool = True
    clock: float = 0.0
    version: int = 0
    refills: int = 0
    flight: list[ReferenceJob] = field(default_factory=list)
    buffer: list[tuple[ReferenceJob, int]] = field(default_factory=list)
    last: dict[int, int] = field(default_factory=dict)
    visits: dict[int, int] = field(default_factory=dict)
    updates: list[tuple[float, list[tuple[int, int, int, int]]]] = field(default_factory=list)
    """(time, [(client, version, staleness, visit), …]) of each update."""
    jobs: list[ReferenceJob] = field(default_factory=list)

    def run(self, updates: int) -> None:
        self.refill()
        while self.version < updates and self.flight:
            self.clock = min(job.end for job in self.flight)
            now = [job for job in self.flight if job.end == self.clock]
            for job in sorted(now, key=lambda job: (not job.lost, job.client)):
                self.handle(job)
                if self.version == updates:
                    return
            self.refill()

    def handle(self, job: ReferenceJob) -> None:
        self.flight.remove(job)
        if job.lost:
            self.last[job.client] = -1
            return
        staleness = self.version - job.version
        if self.most is not None and staleness > self.most:
            self.last[job.client] = -1
            return
        self.visits[job.client] = self.visits.get(job.client, 0) + 1
        self.buffer.append((job, staleness))
        if len(self.buffer) == self.buffer_size:
            found = [(job.client, job.version, staleness, job.visit) for job, staleness in self.buffer]
            self.updates.append((self.clock, found))
            self.version += 1
            self.buffer = []

    def refill(self) -> None:
        free = self.slots - len(self.flight)
        if free == 0 or (free < self.opening and self.flight):
            return
        busy = [job.client for job in self.flight]
        eligible = [
            client
            for client in range(self.n)
            if client not in busy and not (self.once and self.last.get(client, -1) == self.version)
        ]
        if not eligible:
            return
        self.refills += 1
        for client in self.draw(self.refills, eligible, min(free, len(eligible))):
            visit = self.visits.get(client, 0)
            seconds, lost = self.duration(client, self.refills, visit)
            job = ReferenceJob(client, self.version, self.refills, visit, self.clock, self.clock + seconds, lost)
            self.flight.append(job)
            self.jobs.append(job)
            self.last[client] = self.version


def scalar_descent(
    updates: Sequence[tuple[float, list[tuple[int, int, int, int]]]],
    weight: Callable[[int], float],
    *,
    start: float,
    lr: Callable[[int], float],
    divide: str = "buffer",
    current: bool = False,
    mix: float = 1.0,
) -> list[float]:
    """The server's model after each update of F_i(x) = (x - i)^2 / 2, with one local step per visit. lr: the step
    size of the clients that are dispatched from a version."""
    models = [start]
    for _, jobs in updates:
        x, total = models[-1], 0.0
        for client, version, staleness, _ in jobs:
            old = models[version]
            change = -lr(version) * (old - client)
            total += mix * weight(staleness) * (change + old - x if current else change)
        models.append(x + total / divisor(divide, [weight(job[2]) for job in jobs]))
    return models[1:]


def divisor(divide: str, weights: Sequence[float]) -> float:
    """What the sum of an update is divided by. weights: s(tau) of the results in the buffer, without `mix`, which is a
    step size of the server: x <- x + mix sum of s g / Z."""
    return {"buffer": float(len(weights)), "weights": math.fsum(weights), "none": 1.0}[divide]


def scalar_fednova(
    updates: Sequence[Sequence[tuple[int, int, int, int]]],
    weight: Callable[[int], float],
    *,
    start: float,
    lr: float,
    divide: str = "buffer",
    current: bool = False,
    mix: float = 1.0,
) -> list[float]:
    """The same for FedNova with plain local descent. updates: [(client, version, staleness, local steps), …] of each
    update. tau is the mean number of local steps of the buffer, and a client moves tau times its mean local step."""
    models = [start]
    for jobs in updates:
        x, total = models[-1], 0.0
        tau = sum(steps for *_, steps in jobs) / len(jobs)
        for client, version, staleness, steps in jobs:
            y = models[version]
            for _ in range(steps):
                y -= lr * (y - client)
            change = tau * (y - models[version]) / steps
            total += mix * weight(staleness) * (change + models[version] - x if current else change)
        models.append(x + total / divisor(divide, [weight(job[2]) for job in jobs]))
    return models[1:]

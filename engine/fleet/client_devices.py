"""Devices of clients: drawn from distributions, of phones as they were measured, or read from a file."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from . import distributions
from .contract import DeviceNumbers, Devices, Distribution, Unit, keys, nonnegative, normal, positive, require
from .traces import Assign, read_devices, rows_of

Per = Literal["client", "visit"]
COMPUTE, DOWN = distributions.lognormal(80.0, 0.8), distributions.lognormal(6100.0, 1.1)


def jittered(compute: np.ndarray, sigma: float, seed: int, clients: np.ndarray, number: int | np.ndarray) -> np.ndarray:
    """(c,) times e^(sigma z - sigma^2 / 2), whose mean is 1, with a new z for every visit."""
    if not sigma:
        return compute
    return compute * np.exp(sigma * normal(keys(seed, "jitter", clients, number)) - sigma**2 / 2)


@dataclass(frozen=True)
class Drawn(Devices):
    """Devices whose numbers are drawn independently.

    compute: milliseconds for each unit of work, without it log-normal with median 80 and sigma 0.8; down: kbit/s,
    without it log-normal with median 6100 and sigma 1.1; up: kbit/s, or without it a share of down; up_share: this
    share; memory: bytes, or without it unlimited; per: whether a `client` keeps its device, or every `visit` draws a
    new one; jitter: the sigma of a factor of compute with mean 1 that is drawn for every visit; unit: what compute is
    measured for.
    """

    compute: Distribution | None = None
    down: Distribution | None = None
    up: Distribution | None = None
    up_share: float = 0.5
    memory: Distribution | None = None
    per: Per = "client"
    jitter: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(up_share=self.up_share)
        nonnegative(jitter=self.jitter)
        require(self.per in ("client", "visit"), f"per must be client or visit, got {self.per!r}; choose one")

    def numbers(self, seed: int, clients: np.ndarray, number: int | np.ndarray) -> DeviceNumbers:
        visit = () if self.per == "client" else (number,)
        compute = (self.compute or COMPUTE).draw(keys(seed, "device compute", clients, *visit))
        down = (self.down or DOWN).draw(keys(seed, "device down", clients, *visit))
        up = down * self.up_share
        if self.up is not None:
            up = self.up.draw(keys(seed, "device up", clients, *visit))
        memory = np.full(len(clients), np.inf)
        if self.memory is not None:
            memory = self.memory.draw(keys(seed, "device memory", clients))
        return DeviceNumbers(jittered(compute, self.jitter, seed, clients, number), down, up, memory)

    @property
    def constant(self) -> bool:
        return self.per == "client" and not self.jitter

    @property
    def limits_memory(self) -> bool:
        return self.memory is not None


def equal(compute: float = 80.0, down: float = 6100.0, up: float = 3050.0, unit: Unit = "forward") -> Drawn:
    """All clients have the same device. compute: milliseconds for each unit of work; down, up: kbit/s; unit: what
    compute is measured for."""
    return Drawn(unit, distributions.equal(compute), distributions.equal(down), distributions.equal(up))


def lognormal(
    compute: float = 80.0,
    sigma: float = 0.8,
    down: float = 6100.0,
    down_sigma: float = 1.1,
    up_share: float = 0.5,
    jitter: float = 0.0,
    per: Per = "client",
    unit: Unit = "forward",
) -> Drawn:
    """Log-normal speeds and bandwidths, independent of each other. compute: the median of the milliseconds for each
    unit of work; sigma: the standard deviation of their logarithm; down: the median in kbit/s; down_sigma: the standard
    deviation of its logarithm; up_share: up / down; jitter, per, unit: see `drawn`."""
    speeds = distributions.lognormal(compute, sigma), distributions.lognormal(down, down_sigma)
    return Drawn(unit, *speeds, None, up_share, None, per, jitter)


MEDIAN_SCORE = 1768
SCORES = [[0, 500], [5, 608], [25, 1406], [50, MEDIAN_SCORE], [75, 2734], [95, 3746], [100, 4000]]
"""Percentiles of the float score on the CPU of 254 phone models with more than 2 GB in the list of AI Benchmark; the
two ends are ours."""
RAM = [[31, 3e9], [96, 4e9], [78, 6e9], [57, 8e9], [10, 12e9]]
"""Numbers of phone models in the same list by bytes of memory, 2-3 GB as 3 and 10-12 GB as 12."""


def phones(compute: float = 80.0, jitter: float = 0.0, unit: Unit = "forward") -> Drawn:
    """A synthetic population of phones with published percentiles. The milliseconds for each unit of work are inversely
    proportional to the scores of AI Benchmark for phones with more than 2 GB. The bandwidth down is log-normal with a
    median of 6.1 Mbit/s and 26 % below 3 Mbit/s; up is half of it. Memory has the shares of the same list. compute: the
    milliseconds of the median phone; jitter, unit: see `drawn`."""
    times = [[100 - place, compute * MEDIAN_SCORE / score] for place, score in reversed(SCORES)]
    models = sum(count for count, _ in RAM)
    memory = distributions.tiers([[count / models, size] for count, size in RAM])
    return Drawn(unit, distributions.percentiles(times), DOWN, None, 0.5, memory, "client", jitter)


@dataclass(frozen=True)
class DeviceFile(Devices):
    """Devices from a Parquet file with a row for each device, see the guide to fleets for its columns.

    file: its path; assign: how rows are assigned to clients: by the column `client` (number), client i has row i modulo
    their number (modulo), or each client has a row at random (random); without it by number if the file has the column,
    else at random; jitter: see `drawn`; unit: the unit in the file's metadata has priority over this one.
    """

    file: str = ""
    assign: Assign | None = None
    jitter: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        nonnegative(jitter=self.jitter)
        require(bool(self.file), "file is missing; give the path of a Parquet file of devices")
        _, clients, unit = self.read
        if unit is not None:
            object.__setattr__(self, "unit", unit)
        if self.assign is None:
            object.__setattr__(self, "assign", "random" if clients is None else "number")

    @cached_property
    def read(self) -> tuple[DeviceNumbers, np.ndarray | None, Unit | None]:
        """What `read_devices` returns for the file."""
        return read_devices(self.file)

    def check(self, clients: int) -> None:
        self.numbers(0, np.arange(clients), 1)

    def numbers(self, seed: int, clients: np.ndarray, number: int | np.ndarray) -> DeviceNumbers:
        found, numbers, _ = self.read
        rows = rows_of(numbers, len(found.compute), self.assign, seed, clients)
        compute, down, up, memory = (column[rows] for column in found)
        return DeviceNumbers(jittered(compute, self.jitter, seed, clients, number), down, up, memory)

    @property
    def constant(self) -> bool:
        return not self.jitter

    @property
    def limits_memory(self) -> bool:
        return bool(np.isfinite(self.read[0].memory).any())

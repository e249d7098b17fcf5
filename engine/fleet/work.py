"""How much of its local work a client does. A shortened visit takes the first of its local steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from .contract import LocalWork, WorkRequest, keys, positive, probability, require, uniform


def between(low: np.ndarray | int, high: np.ndarray | int, u: np.ndarray) -> np.ndarray:
    """(c,) int64, uniform from low to high, both included, from u (c,) in [0, 1)."""
    return (low + np.floor(u * (np.asarray(high) - low + 1))).astype(np.int64)


@dataclass(frozen=True)
class Full(LocalWork):
    """Every client does all of its local work."""

    whole: ClassVar[bool] = True

    def steps(self, request: WorkRequest) -> np.ndarray:
        return request.full.astype(np.int64)


@dataclass(frozen=True)
class UniformWork(LocalWork):
    """Some clients take fewer steps, uniform from 1 to one less than all of them. p: the probability that a client
    does."""

    p: float

    def __post_init__(self) -> None:
        probability(p=self.p)

    def steps(self, request: WorkRequest) -> np.ndarray:
        stops = uniform(keys(request.seed, "work", request.clients, request.number)) < self.p
        u = uniform(keys(request.seed, "work steps", request.clients, request.number))
        fewer = between(1, np.maximum(request.full - 1, 1), u)
        return np.where(stops, fewer, request.full).astype(np.int64)


@dataclass(frozen=True)
class RangeOfEpochs(LocalWork):
    """A number of epochs that is uniform. low: the smallest number; high: the largest number, which
    federation.local.epochs must be too."""

    low: int
    high: int

    def __post_init__(self) -> None:
        held = 1 <= self.low <= self.high
        require(held, f"1 <= low <= high must hold, got low={self.low}, high={self.high}; change one")

    def check(self, epochs: int | None) -> None:
        require(epochs == self.high, f"federation.local.epochs must be high={self.high}, got {epochs}; set it")

    def steps(self, request: WorkRequest) -> np.ndarray:
        u = uniform(keys(request.seed, "work", request.clients, request.number))
        return between(self.low, self.high, u) * request.batches


@dataclass(frozen=True)
class BySpeed(LocalWork):
    """Slow clients take fewer steps in proportion to their speed, but one at least. full: the milliseconds for a unit
    of work up to which a client takes all steps."""

    full: float

    def __post_init__(self) -> None:
        positive(full=self.full)

    def steps(self, request: WorkRequest) -> np.ndarray:
        fewer = np.floor(request.full * self.full / request.compute)
        return np.minimum(request.full, np.maximum(1, fewer)).astype(np.int64)

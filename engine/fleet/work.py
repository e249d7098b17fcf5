"""How much of its local work a client does. A shortened visit takes the first of its local steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .contract import LocalWork, WorkRequest, keys, positive, probability, require, uniform


@dataclass(frozen=True)
class Work(LocalWork):
    """Local work that is given by a formula for the numbers of local steps. whole: whether every client always does all
    of it. epochs: what federation.local.epochs must be, None for anything."""

    formula: Callable[[WorkRequest], np.ndarray]
    whole: bool = False  # pyright: ignore[reportIncompatibleVariableOverride]
    epochs: int | None = None

    def check(self, epochs: int | None) -> None:
        if self.epochs is not None:
            high = self.epochs
            require(epochs == high, f"federation.local.epochs must be high={high}, got {epochs}; set it")

    def steps(self, request: WorkRequest) -> np.ndarray:
        return self.formula(request).astype(np.int64)


def between(low: np.ndarray | int, high: np.ndarray | int, u: np.ndarray) -> np.ndarray:
    """(c,) whole numbers, uniform from low to high, both included, from u (c,) in [0, 1)."""
    return low + np.floor(u * (np.asarray(high) - low + 1))


def full() -> Work:
    """Every client does all of its local work."""
    return Work(lambda request: request.full, whole=True)


def uniform_steps(p: float) -> Work:
    """Some clients take fewer steps, uniform from 1 to one less than all of them. p: the probability that a client
    does."""
    probability(p=p)

    def steps(request: WorkRequest) -> np.ndarray:
        stops = uniform(keys(request.seed, "work", request.clients, request.number)) < p
        u = uniform(keys(request.seed, "work steps", request.clients, request.number))
        return np.where(stops, between(1, np.maximum(request.full - 1, 1), u), request.full)

    return Work(steps)


def range_of_epochs(low: int, high: int) -> Work:
    """A number of epochs that is uniform. low: the smallest number; high: the largest number, which
    federation.local.epochs must be too."""
    require(1 <= low <= high, f"1 <= low <= high must hold, got low={low}, high={high}; change one")

    def steps(request: WorkRequest) -> np.ndarray:
        u = uniform(keys(request.seed, "work", request.clients, request.number))
        return between(low, high, u) * request.batches

    return Work(steps, epochs=high)


def by_speed(full: float) -> Work:
    """Slow clients take fewer steps in proportion to their speed, but one at least. full: the milliseconds for a unit
    of work up to which a client takes all steps."""
    positive(full=full)

    def steps(request: WorkRequest) -> np.ndarray:
        fewer = np.floor(request.full * full / request.compute)
        return np.minimum(request.full, np.maximum(1, fewer))

    return Work(steps)

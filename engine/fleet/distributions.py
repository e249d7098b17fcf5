"""Distributions of positive numbers: milliseconds, kbit/s or bytes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .contract import Distribution, nonnegative, normal, positive, require, uniform

MOST = 10_000_000
"""The largest number of values of a distribution that keeps a table of them."""


@dataclass(frozen=True)
class Equal(Distribution):
    """One number for all. value: the number."""

    value: float

    def __post_init__(self) -> None:
        positive(value=self.value)

    def draw(self, keys: np.ndarray) -> np.ndarray:
        return np.full(len(keys), float(self.value))


@dataclass(frozen=True)
class Lognormal(Distribution):
    """median e^(sigma z), with z standard normal. median: of the numbers; sigma: the standard deviation of their
    logarithm."""

    median: float
    sigma: float

    def __post_init__(self) -> None:
        positive(median=self.median)
        nonnegative(sigma=self.sigma)
        require(self.sigma <= 50, f"sigma <= 50 must hold, or numbers overflow, got {self.sigma}; lower it")

    def draw(self, keys: np.ndarray) -> np.ndarray:
        return self.median * np.exp(self.sigma * normal(keys))


@dataclass(frozen=True)
class Uniform(Distribution):
    """Uniform. low: the smallest number; high: the largest number."""

    low: float
    high: float

    def __post_init__(self) -> None:
        positive(low=self.low)
        require(self.low <= self.high, f"low <= high must hold, got low={self.low}, high={self.high}; swap them")

    def draw(self, keys: np.ndarray) -> np.ndarray:
        return self.low + (self.high - self.low) * uniform(keys)


@dataclass(frozen=True)
class HalfNormal(Distribution):
    """least + sigma |z|, with z standard normal. sigma: the scale; least: the smallest number."""

    sigma: float
    least: float = 0.0

    def __post_init__(self) -> None:
        positive(sigma=self.sigma)
        nonnegative(least=self.least)

    def draw(self, keys: np.ndarray) -> np.ndarray:
        return np.maximum(self.least + self.sigma * np.abs(normal(keys)), np.finfo(float).tiny)


@dataclass(frozen=True)
class Gaussian(Distribution):
    """mean + sigma z, but not below least, with z standard normal. mean: before it is cut; sigma: the standard
    deviation before it is cut; least: the smallest number."""

    mean: float
    sigma: float
    least: float

    def __post_init__(self) -> None:
        positive(mean=self.mean, least=self.least)
        nonnegative(sigma=self.sigma)

    def draw(self, keys: np.ndarray) -> np.ndarray:
        return np.maximum(self.least, self.mean + self.sigma * normal(keys))


@dataclass(frozen=True)
class Exponential(Distribution):
    """Exponential. mean: of the numbers."""

    mean: float

    def __post_init__(self) -> None:
        positive(mean=self.mean)

    def draw(self, keys: np.ndarray) -> np.ndarray:
        return np.maximum(-self.mean * np.log1p(-uniform(keys)), np.finfo(float).tiny)


@dataclass(frozen=True)
class Zipf(Distribution):
    """least k, where k is from 1 to most with a probability in proportion to k^-a. a: the exponent; most: the largest
    k; least: the smallest number."""

    a: float = 1.5
    most: int = 100
    least: float = 1.0

    def __post_init__(self) -> None:
        positive(a=self.a, least=self.least)
        require(1 <= self.most <= MOST, f"1 <= most <= {MOST:,} must hold, got {self.most}; choose such a number")

    @cached_property
    def cumulative(self) -> np.ndarray:
        """(most,) the probability of k or less."""
        weights = np.arange(1, self.most + 1, dtype=float) ** -self.a
        return np.cumsum(weights) / weights.sum()

    def draw(self, keys: np.ndarray) -> np.ndarray:
        k = np.minimum(np.searchsorted(self.cumulative, uniform(keys), "right"), self.most - 1) + 1
        return self.least * k


@dataclass(frozen=True)
class Tiers(Distribution):
    """Some kinds of devices. tiers: a list of [share, factor] whose shares sum to 1; least: what the factors
    multiply."""

    tiers: list[list[float]]
    least: float = 1.0

    def __post_init__(self) -> None:
        positive(least=self.least)
        good = bool(self.tiers) and all(len(tier) == 2 and tier[0] >= 0 and tier[1] > 0 for tier in self.tiers)
        require(good, f"tiers must be a list of [share, factor], got {self.tiers!r}; give a share and a factor each")
        total = sum(tier[0] for tier in self.tiers)
        require(abs(total - 1) < 1e-6, f"the shares of tiers must sum to 1, got {total:g}; change one")

    def draw(self, keys: np.ndarray) -> np.ndarray:
        shares, factors = np.array(self.tiers, dtype=float).T
        place = np.searchsorted(np.cumsum(shares)[:-1], uniform(keys), "right")
        return self.least * factors[place]


@dataclass(frozen=True)
class Percentiles(Distribution):
    """Numbers with given percentiles. points: a list of [percentile, value] from 0 to 100, between which the logarithm
    of the value is linear."""

    points: list[list[float]]

    def __post_init__(self) -> None:
        ok = len(self.points) >= 2 and all(len(point) == 2 for point in self.points)
        require(ok, f"points must be a list of [percentile, value], got {self.points!r}; give two at least")
        places, values = np.array(self.points, dtype=float).T
        ends = places[0] == 0 and places[-1] == 100
        rises = bool((np.diff(places) > 0).all() and (np.diff(values) >= 0).all() and (values > 0).all())
        require(ends and rises, f"points must rise from percentile 0 to 100, got {self.points!r}; sort them")

    def draw(self, keys: np.ndarray) -> np.ndarray:
        places, values = np.array(self.points, dtype=float).T
        return np.exp(np.interp(100 * uniform(keys), places, np.log(values)))

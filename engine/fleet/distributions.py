"""Distributions of positive numbers: milliseconds, kbit/s or bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .contract import Distribution, nonnegative, normal, positive, require, uniform

MOST = 10_000_000
"""The largest number of values of a distribution that keeps a table of them."""
TINY = np.finfo(float).tiny


@dataclass(frozen=True)
class Law(Distribution):
    """A distribution that is given by a formula, keys (c,) -> (c,) numbers."""

    formula: Callable[[np.ndarray], np.ndarray]

    def draw(self, keys: np.ndarray) -> np.ndarray:
        return self.formula(keys)


def equal(value: float) -> Law:
    """One number for all. value: the number."""
    positive(value=value)
    return Law(lambda keys: np.full(len(keys), float(value)))


def lognormal(median: float, sigma: float) -> Law:
    """median e^(sigma z), with z standard normal. median: of the numbers; sigma: the standard deviation of their
    logarithm."""
    positive(median=median)
    nonnegative(sigma=sigma)
    require(sigma <= 50, f"sigma <= 50 must hold, or numbers overflow, got {sigma}; lower it")
    return Law(lambda keys: median * np.exp(sigma * normal(keys)))


def uniform_between(low: float, high: float) -> Law:
    """Uniform. low: the smallest number; high: the largest number."""
    positive(low=low)
    require(low <= high, f"low <= high must hold, got low={low}, high={high}; swap them")
    return Law(lambda keys: low + (high - low) * uniform(keys))


def halfnormal(sigma: float, least: float = 0.0) -> Law:
    """least + sigma |z|, with z standard normal. sigma: the scale; least: the smallest number."""
    positive(sigma=sigma)
    nonnegative(least=least)
    return Law(lambda keys: np.maximum(least + sigma * np.abs(normal(keys)), TINY))


def gaussian(mean: float, sigma: float, least: float) -> Law:
    """mean + sigma z, but not below least, with z standard normal. mean: before it is cut; sigma: the standard
    deviation before it is cut; least: the smallest number."""
    positive(mean=mean, least=least)
    nonnegative(sigma=sigma)
    return Law(lambda keys: np.maximum(least, mean + sigma * normal(keys)))


def exponential(mean: float) -> Law:
    """Exponential. mean: of the numbers."""
    positive(mean=mean)
    return Law(lambda keys: np.maximum(-mean * np.log1p(-uniform(keys)), TINY))


def zipf(a: float = 1.5, most: int = 100, least: float = 1.0) -> Law:
    """least k, where k is from 1 to most with a probability in proportion to k^-a. a: the exponent; most: the largest
    k; least: the smallest number."""
    positive(a=a, least=least)
    require(1 <= most <= MOST, f"1 <= most <= {MOST:,} must hold, got {most}; choose such a number")
    weights = np.arange(1, most + 1, dtype=float) ** -a
    cumulative = np.cumsum(weights) / weights.sum()  # (most,) the probability of k or less
    return Law(lambda keys: least * (np.minimum(np.searchsorted(cumulative, uniform(keys), "right"), most - 1) + 1))


def tiers(tiers: list[list[float]], least: float = 1.0) -> Law:
    """Some kinds of devices. tiers: a list of [share, factor] whose shares sum to 1; least: what the factors
    multiply."""
    positive(least=least)
    good = bool(tiers) and all(len(tier) == 2 and tier[0] >= 0 and tier[1] > 0 for tier in tiers)
    require(good, f"tiers must be a list of [share, factor], got {tiers!r}; give a share and a factor each")
    total = sum(tier[0] for tier in tiers)
    require(abs(total - 1) < 1e-6, f"the shares of tiers must sum to 1, got {total:g}; change one")
    shares, factors = np.array(tiers, dtype=float).T
    return Law(lambda keys: least * factors[np.searchsorted(np.cumsum(shares)[:-1], uniform(keys), "right")])


def percentiles(points: list[list[float]]) -> Law:
    """Numbers with given percentiles. points: a list of [percentile, value] from 0 to 100, between which the logarithm
    of the value is linear."""
    ok = len(points) >= 2 and all(len(point) == 2 for point in points)
    require(ok, f"points must be a list of [percentile, value], got {points!r}; give two at least")
    places, values = np.array(points, dtype=float).T
    ends = places[0] == 0 and places[-1] == 100
    rises = bool((np.diff(places) > 0).all() and (np.diff(values) >= 0).all() and (values > 0).all())
    require(ends and rises, f"points must rise from percentile 0 to 100, got {points!r}; sort them")
    return Law(lambda keys: np.exp(np.interp(100 * uniform(keys), places, np.log(values))))

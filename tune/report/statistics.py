"""Statistics of a report: spread over seeds, paired differences, costs of reaching a target, the Pareto front."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...workloads import counted
from ..run_files import same
from ..study.folder import Points

DRAWS = 10_000
"""The samples of a bootstrap."""


class Spread(NamedTuple):
    """Mean and sample standard deviation (n - 1 in the denominator) of n values; nan where undefined."""

    mean: float
    std: float
    n: int


def spread(values: Sequence[float]) -> Spread:
    if not values:
        return Spread(math.nan, math.nan, 0)
    std = float(np.std(values, ddof=1)) if len(values) > 1 else math.nan
    return Spread(float(np.mean(values)), std, len(values))


class Paired(NamedTuple):
    """A paired comparison: the mean of a - b over the seeds that both have, its 95 % confidence interval, and the
    p-value of Student's paired t test. n: number of these seeds; interval and p are nan for fewer than two. Of
    differences that are all equal and not 0, p is nan and the interval a point: a test would say that they have no
    error at all.
    """

    difference: float
    low: float
    high: float
    p: float
    n: int


def paired(a: Mapping[int, float], b: Mapping[int, float]) -> Paired:
    """Compare two methods. a, b: seed -> value. Values that are the `same` have no difference."""
    from scipy import stats

    both = np.array([0.0 if same(a[seed], b[seed]) else a[seed] - b[seed] for seed in sorted(a.keys() & b.keys())])
    if len(both) < 2:
        return Paired(float(both.mean()) if len(both) else math.nan, math.nan, math.nan, math.nan, len(both))
    mean = float(both.mean())
    if not both.any():  # t would be 0/0, and SciPy warns
        return Paired(0.0, 0.0, 0.0, 1.0, len(both))
    size = max(abs(a[seed]) for seed in a.keys() & b.keys())
    if same(size + both, size + both[0]).all():  # in the digits that are kept of a and b
        return Paired(mean, mean, mean, math.nan, len(both))
    test: Any = stats.ttest_1samp(both, 0.0)
    low, high = test.confidence_interval(0.95)
    return Paired(mean, float(low), float(high), float(test.pvalue), len(both))


def bootstrap(values: NDArray[np.float64]) -> tuple[float, float, float]:
    """(mean, low, high): the mean of the values and its 95 % confidence interval, by the percentiles of the means of
    samples with replacement (Efron 1979). nan for no values, and no ends for one. The samples are the same in every
    call with as many values. values: (n,)."""
    n = len(values)
    if n < 2:
        return (float(values[0]) if n else math.nan), math.nan, math.nan
    draws = counted.uniform(counted.key("bootstrap"), DRAWS * n).numpy().reshape(DRAWS, n)
    means = values[(draws * n).astype(np.int64)].mean(axis=1)
    low, high = np.quantile(means, (0.025, 0.975))
    return float(values.mean()), float(low), float(high)


def holm(ps: Sequence[float]) -> list[float]:
    """p-values adjusted for multiple comparisons (Holm 1979); nan stays nan and does not count as a comparison."""
    order = sorted((p, i) for i, p in enumerate(ps) if not math.isnan(p))
    adjusted, least = [math.nan] * len(ps), 0.0
    for rank, (p, i) in enumerate(order):
        least = max(least, min(1.0, (len(order) - rank) * p))
        adjusted[i] = least
    return adjusted


class Reached(NamedTuple):
    """The costs of reaching a target."""

    rounds: float
    sent: float  # bytes, up and down
    seconds: float
    clock: float = math.nan  # virtual seconds, nan without a virtual clock
    visits: float = math.nan  # of clients, nan without a virtual clock


def reached(points: Points | None, target: float, better: Callable[[float, float], bool]) -> Reached | None:
    """The costs until the first evaluation that is the `same` as the target, or better; None if there is none."""
    if points is None:
        return None
    for i, value in enumerate(points.values):
        if same(value, target) or better(value, target):
            virtual = [math.nan if each is None else float(each[i]) for each in (points.clock, points.visits)]
            return Reached(float(points.rounds[i]), float(points.sent[i]), float(points.seconds[i]), *virtual)
    return None


def front(points: Sequence[tuple[float, float]], better: Callable[[float, float], bool]) -> list[int]:
    """Indices of the Pareto front of points (cost, value), in the order of cost."""
    kept: list[int] = []
    for i in sorted(range(len(points)), key=lambda i: points[i][0]):
        if not kept or better(points[i][1], points[kept[-1]][1]):
            if kept and points[kept[-1]][0] == points[i][0]:
                kept.pop()
            kept.append(i)
    return kept

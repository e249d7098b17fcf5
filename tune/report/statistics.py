"""Numbers of a report: spread over seeds, paired differences, what it took to reach a target, who is not dominated."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..study.folder import Points


class Spread(NamedTuple):
    """`std`: the sample's, n - 1 in the denominator; nan for one value."""

    mean: float
    std: float
    n: int


def spread(values: Sequence[float]) -> Spread:
    if not values:
        return Spread(math.nan, math.nan, 0)
    std = float(np.std(values, ddof=1)) if len(values) > 1 else math.nan
    return Spread(float(np.mean(values)), std, len(values))


class Paired(NamedTuple):
    """Mean of a - b over the seeds that both have, its 95 % interval, and the p of no difference (Student's paired t).

    nan where there are fewer than two such seeds.
    """

    difference: float
    low: float
    high: float
    p: float
    n: int


def paired(a: Mapping[int, float], b: Mapping[int, float]) -> Paired:
    """a, b: seed -> value."""
    from scipy import stats

    both = np.array([a[seed] - b[seed] for seed in sorted(a.keys() & b.keys())])
    if len(both) < 2:
        return Paired(float(both.mean()) if len(both) else math.nan, math.nan, math.nan, math.nan, len(both))
    mean = float(both.mean())
    if both.std() == 0:  # a t of 0/0 or infinity, of which SciPy warns
        return Paired(mean, mean, mean, 1.0 if mean == 0 else 0.0, len(both))
    test: Any = stats.ttest_1samp(both, 0.0)
    low, high = test.confidence_interval(0.95)
    return Paired(mean, float(low), float(high), float(test.pvalue), len(both))


def holm(ps: Sequence[float]) -> list[float]:
    """Holm's adjustment for having looked at all of them; nan stays nan and does not count. Holm 1979."""
    order = sorted((p, i) for i, p in enumerate(ps) if not math.isnan(p))
    adjusted, least = [math.nan] * len(ps), 0.0
    for rank, (p, i) in enumerate(order):
        least = max(least, min(1.0, (len(order) - rank) * p))
        adjusted[i] = least
    return adjusted


class Reached(NamedTuple):
    rounds: float
    sent: float  # bytes, up and down
    seconds: float


def reached(points: Points | None, target: float, better: Callable[[float, float], bool]) -> Reached | None:
    """What the first evaluation at or beyond the target had taken."""
    if points is None:
        return None
    for i, value in enumerate(points.values):
        if value == target or better(value, target):
            return Reached(float(points.rounds[i]), float(points.sent[i]), float(points.seconds[i]))
    return None


def front(points: Sequence[tuple[float, float]], better: Callable[[float, float], bool]) -> list[int]:
    """Of (cost, value): those that no other beats in one and equals or beats in the other, by cost."""
    kept: list[int] = []
    for i in sorted(range(len(points)), key=lambda i: points[i][0]):
        if not kept or better(points[i][1], points[kept[-1]][1]):
            if kept and points[kept[-1]][0] == points[i][0]:
                kept.pop()
            kept.append(i)
    return kept

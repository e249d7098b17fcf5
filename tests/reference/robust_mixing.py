"""Slow, independent pre-aggregations, which change rows before a robust rule: numpy float64; conventions as in
`robust_rules`. Each returns the new rows, (S', P).

    nnm         Allouah et al. 2023, nearest-neighbour mixing
    bucketing   Karimireddy, He, Jaggi 2022
    clip
    arc         Allouah et al. 2024, adaptive robust clipping
"""

import numpy as np

from tests.reference.robust_rules import distances, mean_of, norms, shrunk, smallest


def nnm(x, f):
    """Every row becomes the mean of the S - f rows that are nearest to it; it is the nearest to itself."""
    d = distances(x)
    return np.array([mean_of(x, [i, *smallest_others(d[i], i, len(x) - f - 1)]) for i in range(len(x))])


def smallest_others(row, i, count):
    """Positions of the `count` smallest entries of `row`, without position i."""
    return [j for j in smallest([-1.0 if j == i else v for j, v in enumerate(row)], count + 1) if j != i]


def bucketing(x, order, s=2):
    """Means of runs of s rows in the given order; the last run may be shorter."""
    return np.array([x[list(order[a : a + s])].mean(axis=0) for a in range(0, len(x), s)])


def clip(x, c=None, c_relative=1.0):
    """Rows clipped to norm c; c None: c_relative times the median of the norms."""
    bound = c_relative * float(np.median(norms(x))) if c is None else c
    return np.array([shrunk(row, bound) for row in x])


def arc(x, f):
    """Rows clipped to the (k + 1)-th largest norm, k = floor(2 f (S - f) / S)."""
    k = 2 * f * (len(x) - f) // len(x)
    return clip(x, sorted(norms(x), reverse=True)[k])

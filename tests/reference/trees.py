"""Trees as plain dicts name -> float64 array."""

import numpy as np


def copy(x):
    return {name: np.array(value, dtype=np.float64) for name, value in x.items()}


def zeros(x):
    return {name: np.zeros(np.shape(value)) for name, value in x.items()}


def norm(x):
    return np.sqrt(sum(float((value * value).sum()) for value in x.values()))


def add(x, y, factor=1.0):
    return {name: x[name] + factor * y[name] for name in x}


def times(x, factor):
    return {name: factor * value for name, value in x.items()}


def mean(trees, divisor=None):
    total = trees[0]
    for tree in trees[1:]:
        total = add(total, tree)
    return times(total, 1.0 / (len(trees) if divisor is None else divisor))

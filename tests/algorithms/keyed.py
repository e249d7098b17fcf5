"""Helpers for the checks of the slow references: one problem, its cohorts and numbers of steps, and random numbers that
depend only on their key.

TOLERANCE: float64 rounds at 1e-16; the longest path here (6 rounds of up to 4 steps) adds about 1e3 roundings of values
near 10, so 1e-9 is ample.
"""

import zlib
from typing import Any

import numpy as np

from tests.algorithms.problems import Quadratic, partial
from tests.reference import rules
from tests.reference.trees import norm

TOLERANCE = 1e-9
PROBLEM = Quadratic()
LAYERS = ["W", "V", "U", "kernel"]
COHORTS, STEPS = partial()


def uniform(low, high):
    """The function (round, client, layer, name) -> uniform numbers, which are the same at every call."""

    def draw(r, i, layer, name, shape):
        key = (r, -1 if i is None else i, zlib.crc32(f"{layer} {name}".encode()))
        return np.random.default_rng([part + 1 for part in key]).uniform(low, high, shape)

    return draw


def play(method, *arguments, problem: Any = PROBLEM, rule=None, where=(COHORTS, STEPS), **settings):
    rule = rules.Sgd(0.05) if rule is None else rule
    return method(problem.gradient, problem.start, problem.clients, *where, rule, *arguments, **settings)


def same(tree, expected, names=None):
    for name in expected if names is None else names:
        np.testing.assert_allclose(tree[name], expected[name], rtol=TOLERANCE, atol=TOLERANCE, err_msg=name)


def same_paths(left, right, names=None):
    assert len(left) == len(right) == len(COHORTS)
    for x, y in zip(left, right, strict=True):
        same(x, y, names)
    assert norm({name: left[-1][name] - left[0][name] for name in left[0]}) > 1e-3, "nothing moved"

"""What rules of aggregation promise: bounds on their error, and which changes of the rows they follow."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest

from tests.aggregation.rules import answer
from tests.aggregation.test_references import CALLS, rows


def ratio(x: np.ndarray, found: np.ndarray, f: int) -> float:
    """The largest |F - mean of T|^2 / mean of |x_i - mean of T|^2 over all T of S - f rows."""
    largest = 0.0
    for chosen in combinations(range(len(x)), len(x) - f):
        kept = x[list(chosen)]
        mean = kept.mean(axis=0)
        spread, away = np.square(kept - mean).sum(1).mean(), np.square(found - mean).sum()
        if spread > 1e-12:
            largest = max(largest, away / spread)
        else:
            assert away < 1e-12
    return largest


def bound(name: str, r: float) -> float:
    """kappa of (f, kappa)-robustness, with r = f / (S - 2 f): Allouah et al. 2023, tables 1 and 2."""
    return {"trimmed_mean": 6 * r * (1 + r), "krum": 6 * (1 + r)}.get(name, 4 * (1 + r) ** 2)


@pytest.mark.parametrize("mixed", [False, True], ids=["alone", "after nnm"])
@pytest.mark.parametrize("name", ["trimmed_mean", "krum", "median", "geometric_median"])
def test_error_is_within_the_known_bound(name: str, mixed: bool):
    """Random rows, some with rows far away or with copies, and the rows 0 and 1 that no rule can tell apart."""
    random = np.random.default_rng(3)
    for count, f in [(5, 1), (7, 2), (9, 2)]:
        kappa = bound(name, f / (count - 2 * f))
        kappa = 8 * f / (count - f) * (kappa + 1) if mixed else kappa
        spec: dict[str, Any] = {"name": name, **({"f": f} if name in ("trimmed_mean", "krum") else {})}
        spec["before"] = [{"name": "nnm", "f": f}] if mixed else []
        ones = np.r_[np.zeros((count - f, 1)), np.ones((f, 1))]
        assert ratio(ones, answer(ones, spec), f) <= kappa + 1e-9
        for trial in range(12):
            x = random.normal(size=(count, 1 + trial % 4))
            x[:f] *= [1, 3, 30][trial % 3]
            if trial % 5 == 0:
                x[1] = x[2]
            assert ratio(x, answer(x, spec), f) <= kappa + 1e-9


def rotation(length: int) -> np.ndarray:
    return np.linalg.qr(np.random.default_rng(7).normal(size=(length, length)))[0]


MOVED = [name for name in CALLS if name not in ("norm_clipping", "sign_vote", "clipped_clustering")]
SCALED = [name for name in CALLS if name != "sign_vote"]
TURNED = ["mean", "geometric_median", "krum", "multi_krum", "mda", "caf", "dnc", "norm_clipping"]
ORDERED = [name for name in CALLS if name != "bulyan"]


def rule(name: str) -> dict[str, Any]:
    return {"name": name, **CALLS[name][0]}


@pytest.mark.parametrize("name", MOVED)
def test_rules_follow_a_translation_of_all_rows(name: str):
    x, by = rows(1), np.random.default_rng(5).normal(size=23) * 3
    np.testing.assert_allclose(answer(x + by, rule(name)), answer(x, rule(name)) + by, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("name", SCALED)
def test_rules_follow_a_positive_factor(name: str):
    x = rows(1)
    for factor in (0.01, 37.0):
        np.testing.assert_allclose(answer(factor * x, rule(name)), factor * answer(x, rule(name)), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("name", CALLS)
def test_rules_follow_a_negation(name: str):
    x = rows(1)
    np.testing.assert_allclose(answer(-x, rule(name)), -answer(x, rule(name)), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("name", TURNED)
def test_rules_of_distances_follow_a_rotation(name: str):
    x, turn = rows(1), rotation(23)
    np.testing.assert_allclose(answer(x @ turn, rule(name)), answer(x, rule(name)) @ turn, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ORDERED)
def test_the_order_of_rows_does_not_matter(name: str):
    x = rows(1)
    other = np.random.default_rng(11).permutation(len(x))
    np.testing.assert_allclose(answer(x[other], rule(name)), answer(x, rule(name)), rtol=1e-7, atol=1e-9)


def test_other_rules_do_not_follow_a_translation():
    """Those of the table in docs that look at norms: else the tests above would test nothing."""
    x, by = rows(1), np.full(23, 2.0)
    for name in ("norm_clipping", "sign_vote", "clipped_clustering"):
        assert not np.allclose(answer(x + by, rule(name)), answer(x, rule(name)) + by, rtol=1e-3)

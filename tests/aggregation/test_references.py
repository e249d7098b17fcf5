"""Rules of aggregation against slow references that use no Gram matrix, and properties that all rules must have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fedfleet.algorithms.aggregation.bucketing import buckets
from fedfleet.algorithms.aggregation.mda import least_diameter
from fedfleet.algorithms.aggregation.signguard import SignGuard
from fedfleet.engine.aggregation.passes import sort_columns
from tests.aggregation.rules import answer, applied, decision, messages
from tests.reference import robust_mixing, robust_rules

Reference = Callable[[np.ndarray], np.ndarray]
F = 2
CALLS: dict[str, tuple[dict[str, Any], Reference]] = {
    "mean": ({}, robust_rules.mean),
    "median": ({}, robust_rules.median),
    "trimmed_mean": ({"f": F}, lambda x: robust_rules.trimmed_mean(x, F)),
    "meamed": ({"f": F}, lambda x: robust_rules.meamed(x, F)),
    "geometric_median": ({"tol": 1e-12}, robust_rules.geometric_median),
    "krum": ({"f": F}, lambda x: robust_rules.krum(x, F)),
    "multi_krum": ({"f": F}, lambda x: robust_rules.multi_krum(x, F)),
    "bulyan": ({"f": F}, lambda x: robust_rules.bulyan(x, F)),
    "mda": ({"f": F}, lambda x: robust_rules.mda(x, F)),
    "norm_clipping": ({}, robust_rules.norm_clipping),
    "caf": ({"f": F}, lambda x: robust_rules.caf(x, F)),
    "sign_vote": ({}, robust_rules.sign_vote),
    "dnc": ({"f": F}, lambda x: robust_rules.dnc(x, F, [range(x.shape[1])])),
    "clipped_clustering": ({}, lambda x: robust_rules.clipped_clustering(x)[0]),
}


def rows(seed: int, count: int = 11, length: int = 23) -> np.ndarray:
    """Rows near a common one, except for two that are far away."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(count, length)) + random.normal(size=length)
    x[3] *= 5
    x[7] = -3 * x[7]
    return x


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", CALLS)
def test_rules(name: str, seed: int):
    arguments, reference = CALLS[name]
    x = rows(seed)
    np.testing.assert_allclose(answer(x, {"name": name, **arguments}), reference(x), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("seed", range(3))
def test_rules_with_an_extra_vector(seed: int):
    x, start = rows(seed), np.random.default_rng(9).normal(size=23)
    for arguments in ({"tau": 2.0, "iterations": 3}, {"tau_relative": 0.5}):
        expected = robust_rules.centred_clipping(x, **arguments, start=start)
        found = answer(x, {"name": "centred_clipping", **arguments}, start)
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(answer(x, "fltrust", start), robust_rules.fltrust(x, start), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_signguard(seed: int):
    x = rows(seed, length=60)
    window = SignGuard().window(messages(x, 0))
    expected = robust_rules.signguard(x, start=window.start)
    np.testing.assert_allclose(answer(x, "signguard"), expected, rtol=1e-9, atol=1e-12)


def test_clipped_clustering_remembers_norms():
    first, second = rows(0), 3 * rows(1)
    decided = decision(first, "clipped_clustering")
    _, seen = robust_rules.clipped_clustering(first)
    expected, _ = robust_rules.clipped_clustering(second, seen)
    np.testing.assert_allclose(answer(second, "clipped_clustering", state=decided.state), expected, rtol=1e-9)


BEFORE: dict[str, tuple[dict[str, Any], Reference]] = {
    "nnm": ({"f": F}, lambda x: robust_mixing.nnm(x, F)),
    "clip": ({"c": 3.0}, lambda x: robust_mixing.clip(x, 3.0)),
    "arc": ({"f": F}, lambda x: robust_mixing.arc(x, F)),
}


@pytest.mark.parametrize("name", BEFORE)
def test_before(name: str):
    arguments, reference = BEFORE[name]
    x = rows(0)
    np.testing.assert_allclose(applied(x, {"name": name, **arguments}), reference(x), rtol=1e-9, atol=1e-12)


def test_bucketing():
    x, order = rows(0), np.random.default_rng(0).permutation(11)
    np.testing.assert_allclose(buckets(order, 2) @ x, robust_mixing.bucketing(x, order, 2), rtol=1e-12)


NNM, ARC, CLIP = {"name": "nnm", "f": 1}, {"name": "arc", "f": 1}, {"name": "clip", "c": 2.0}
BUCKETING = {"name": "bucketing", "s": 3}
CHAINS = [[NNM], [BUCKETING], [CLIP, NNM], [NNM, ARC], [ARC, BUCKETING]]


@pytest.mark.parametrize("before", CHAINS, ids=str)
@pytest.mark.parametrize("name", ["trimmed_mean", "multi_krum", "geometric_median", "caf"])
def test_chains_of_rows_and_of_gram_matrices_agree(name: str, before: list[Any]):
    """The engine combines Gram matrices; here the rows themselves are combined, one part after the other."""
    x = rows(0, 16)
    spec = {"name": name, **({"tol": 1e-12} if name == "geometric_median" else {"f": 1})}
    mixed = x
    for part in before:
        mixed = applied(mixed, part)
    np.testing.assert_allclose(answer(x, {**spec, "before": before}), answer(mixed, spec), rtol=1e-7, atol=1e-9)


def test_least_diameter_is_that_of_all_sets():
    random = np.random.default_rng(0)
    for count, f in [(7, 1), (8, 2), (9, 3), (10, 4)] * 5:
        x = random.integers(-2, 3, size=(count, 2)).astype(float)  # with many ties
        found = x[least_diameter(robust_rules.distances(x), f)].mean(axis=0)
        np.testing.assert_allclose(found, robust_rules.mda(x, f), atol=1e-12)


KEEPS = ["trimmed_mean", "meamed", "median", "krum", "multi_krum", "mda", "caf", "geometric_median"]


@pytest.mark.parametrize("before", [[], ["nnm"]], ids=str)
@pytest.mark.parametrize("name", KEEPS)
def test_equal_rows_are_returned(name: str, before: list[str]):
    """S - f rows are equal, and the other f are arbitrary."""
    x = np.tile(np.random.default_rng(0).normal(size=13), (9, 1))
    x[[2, 5]] = 1e6 * np.random.default_rng(1).normal(size=(2, 13))
    f = {"f": 2} if name in CALLS and "f" in CALLS[name][0] else {}
    before = [{"name": part, "f": 2} for part in before]  # type: ignore[misc]
    np.testing.assert_allclose(answer(x, {"name": name, **f, "before": before}), x[0], rtol=1e-9)


@pytest.mark.parametrize("name", ["median", "trimmed_mean", "meamed", "geometric_median", "krum", "multi_krum", "mda"])
def test_one_enormous_row(name: str):
    """One row has entries of 1e30. The result stays in the range of the honest rows, or near it for rules that are
    invariant under rotations."""
    x = rows(0)
    x[4] = 1e30
    arguments = {k: v for k, v in CALLS[name][0].items() if k == "f"}
    honest = np.delete(x, 4, axis=0)
    found = answer(x, {"name": name, **arguments})
    assert (honest.min(axis=0) - 1e-6 <= found).all()
    assert (found <= honest.max(axis=0) + 1e-6).all()


@pytest.mark.parametrize("count", [*range(1, 20), 33, 100])
def test_columns_are_sorted(count: int):
    x = np.random.default_rng(count).integers(-5, 5, size=(count, 37)).astype(np.float32)
    assert np.array_equal(sort_columns(x.copy()), np.sort(x, axis=0))


def test_median_of_one_coordinate_is_the_geometric_one():
    for seed in range(5):
        x = np.random.default_rng(seed).normal(size=(9, 1))
        assert answer(x, "geometric_median") == answer(x, "median") == np.median(x)

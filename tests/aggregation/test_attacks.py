"""Attacks against the golden values of published code, and against slow references; who is Byzantine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fedfleet.algorithms.attacks import draws
from fedfleet.algorithms.attacks.alie import z_max
from fedfleet.workloads import counted
from tests.aggregation.attacks import built, columns, own, plan, sent
from tests.aggregation.rules import answer
from tests.aggregation.test_golden import A
from tests.reference import byzantine

X = np.random.default_rng(1).normal(size=(7, 12)) + 0.3


def test_z_max():
    cases = {(10, 3): 0.1800, (17, 4): 0.2934, (20, 4): 0.1573, (20, 6): 0.3661, (25, 5): 0.2533, (50, 24): 1.4261}
    for (rows, liars), z in cases.items():
        assert z_max(rows, liars) == pytest.approx(z, abs=5e-5)
    assert z_max(10, 1) == 0  # where the formula would help the defence


GOLDEN = [
    ("alie", {"z": 1.5, "sign": "+"}, (8.5, 9.5, 10.5)),
    ("ipm", {"epsilon": 2.0}, (-8, -10, -12)),
    ("sign_flip", {"of": "mean"}, (-4, -5, -6)),
    ("mimic", {}, (1, 2, 3)),
    ("min_max", {}, (1, 2, 3)),
    ("min_max", {"p": "sign"}, (1, 2, 3)),
    ("min_sum", {}, (1, 2, 3)),
    ("min_max", {"p": "unit"}, (1.61581587, 2.01976984, 2.42372381)),
    ("min_sum", {"p": "unit"}, (1.63137390, 2.03921737, 2.44706085)),
    ("min_sum", {"bound": "min"}, (4, 5, 6)),
]


@pytest.mark.parametrize(("name", "arguments", "expected"), GOLDEN)
def test_golden_values(name: str, arguments: dict[str, Any], expected: tuple[float, ...]):
    np.testing.assert_allclose(sent(name, A, **arguments), expected, rtol=0, atol=1e-8)


DEFENCE = {"name": "trimmed_mean", "f": 1, "before": [{"name": "nnm", "f": 1}, {"name": "clip", "c": 2.0}]}


def error(vector: np.ndarray) -> float:
    """The distance of the defence's answer from the mean, where the defence gets the rows A and the vector once."""
    found = answer(np.vstack([A, vector]), DEFENCE) - A.mean(axis=0)
    return float(np.sqrt(np.square(found).sum()))


def test_optimal_attacks():
    """The result of ByzFL's search against NNM, clipping at norm 2 and a trimmed mean, with one Byzantine client."""
    decided, _ = plan(built("optimal_ipm"), A, 1, error)
    assert (*decided.numbers, decided.columns["error"]) == pytest.approx((0.68719477, 6.78468261), abs=1e-8)
    vector = sent("optimal_ipm", A, error=error)
    np.testing.assert_allclose(vector, (-2.74877907, -3.43597384, -4.12316860), atol=1e-8)
    decided, _ = plan(built("optimal_alie", sign="+"), A, 1, error)
    assert (*decided.numbers, decided.columns["error"]) == pytest.approx((2.97328372, 6.77786555), abs=1e-8)


COMPARED = [
    ("ipm", {"epsilon": 0.7}, lambda x: byzantine.ipm(x, 0.7)),
    ("alie", {"z": 1.1}, lambda x: byzantine.alie(x, 1.1)),
    ("half_negated", {"z": 1.1}, lambda x: byzantine.half_negated_alie(x, 1.1)),
    ("half_negated", {"of": "min_max"}, byzantine.half_negated_min_max),
    *[("min_max", {"p": p}, lambda x, p=p: byzantine.min_max(x, p)) for p in ("std", "unit", "sign")],
    *[
        ("min_sum", {"p": p, "bound": bound}, lambda x, p=p, bound=bound: byzantine.min_sum(x, p, bound))
        for p in ("std", "unit", "sign")
        for bound in ("max", "min")
    ],
]


@pytest.mark.parametrize(("name", "arguments", "reference"), COMPARED)
def test_against_references(name: str, arguments: dict[str, Any], reference: Any):
    np.testing.assert_allclose(sent(name, X, 2, **arguments), reference(X), rtol=1e-10, atol=1e-12)


def test_byz_mean_is_reached():
    rows = sent("byz_mean", X, 3)
    np.testing.assert_allclose(rows, byzantine.byz_mean(X, 3), rtol=1e-12)
    e = X.mean(axis=0) - 0.5 * X.std(axis=0, ddof=1)
    np.testing.assert_allclose(np.vstack([X, rows]).mean(axis=0), e, rtol=1e-12)


def test_directed():
    whole = columns(X)
    uniform = counted.uniform(whole.key, X.shape[1]).numpy()
    np.testing.assert_allclose(sent("directed", X), byzantine.directed(X, uniform), rtol=1e-12)


def test_signguard_noise_has_the_signs_of_the_mean():
    vector, mean = sent("signguard_noise", X, match="norm"), X.mean(axis=0)
    assert [(vector > 0).sum(), (vector < 0).sum()] == [(mean > 0).sum(), (mean < 0).sum()]
    assert np.sqrt(np.square(vector).sum()) == pytest.approx(np.median(np.sqrt(np.square(X).sum(1))))


def test_pieces_are_cut_from_whole_vectors():
    key = counted.key(3)
    for length in (9, 10):
        whole = counted.normal(key, length)
        parts = [draws.normal(key, length, begin, min(begin + 4, length)) for begin in range(0, length, 4)]
        assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(draws.uniform(key, 3, 8), counted.uniform(key, 9)[3:8])
    attack = built("directed")
    whole = attack.forge(columns(X))
    parts = [attack.forge(columns(X, begin, begin + 5)) for begin in range(0, 12, 5)]
    assert np.array_equal(np.concatenate(parts), whole)


def test_own_messages():
    x = X[0]
    assert np.array_equal(own("sign_flip", x, k=2.0), byzantine.sign_flip(x, 2.0))
    assert np.array_equal(own("zero", x), byzantine.zero(x))
    assert np.isinf(own("infinite", x)).all()
    assert np.isnan(own("nan", x)).all()
    normals = counted.normal(counted.key(0, "attack", 1, 3, 0), len(x)).numpy()
    assert np.array_equal(own("gaussian", x, mean=0.2, std=0.3), byzantine.gaussian(normals, 0.2, 0.3))
    assert np.array_equal(own("noise", x, std=0.3), byzantine.noise(x, normals, 0.3))
    assert np.allclose(own("backdoor", x), 5 * x)
    size = float(np.sqrt(np.square(x).sum()))
    assert np.allclose(own("backdoor", x, bound=2.0), x * min(5, 2 / size))


def test_mimic_learns_a_direction():
    """Three rounds, with the attack's state kept as rows, agree with the slow reference."""
    attack = built("mimic", warmup=3)
    reference = byzantine.MimicWarmUp(counted.normal(columns(X).key, X.shape[1]).numpy(), 3)
    remembered, state = np.zeros((2, X.shape[1])), attack.init()
    for round in range(4):
        rows = X + 0.2 * np.random.default_rng(round).normal(size=X.shape)
        decided, full = plan(attack, rows, 2, remembered=remembered, state=state)
        assert decided.numbers == (reference.target(rows),)
        remembered, state = np.stack([weights @ full for weights in decided.remember]), decided.state
        np.testing.assert_allclose(remembered[1], reference.z, rtol=1e-9, atol=1e-12)


def test_members_follow_the_seed():
    attack = built("zero")
    first, again, other = (attack.members(100, seed) for seed in (1, 1, 2))
    assert first.sum() == 20
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    named = built("zero", share=None, clients=[3, 5])
    assert np.flatnonzero(named.members(10, 0)).tolist() == [3, 5]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"share": None}, "give share or clients"),
        ({"share": 1.0}, "0 <= share < 1 must hold"),
        ({"rounds": "3"}, "rounds must be the first and the last round"),
    ],
)
def test_refused(arguments: dict[str, Any], words: str):
    with pytest.raises(ValueError, match=words):
        built("zero", **arguments)

"""Identities of the slow references of EF21-P and FedBAT and of their codes. Tolerances as in `keyed`.

DIFFERENCE: a central difference of width 1e-6 is off by 1e-10 for rounding, 1e-12 times a third derivative for
curvature.
"""

import functools
from fractions import Fraction

import numpy as np
import pytest

from tests.algorithms.keyed import COHORTS, LAYERS, PROBLEM, STEPS, TOLERANCE, play, same, same_paths, uniform
from tests.algorithms.problems import everyone
from tests.reference import codecs, fedbat, methods, rules
from tests.reference.trees import norm

DIFFERENCE = 1e-6
BELOW_ONE = uniform(0.0, 1.0)

MAKE = functools.partial(play, codecs.ef21_p)


@pytest.mark.parametrize("shift", [None, 0.5, 1.0])
def test_ef21p_with_all_entries_is_fedavg(shift):
    """L10: for k = d; with shifts this holds under full participation, where they cancel in the mean."""
    where = (COHORTS, STEPS) if shift is None else everyone(5, len(COHORTS), [1, 2, 3, 4, 1])
    path = MAKE(LAYERS, 1, None, shift=shift, where=where)
    same_paths(path.x, play(methods.fedavg, where=where).x)
    same_paths(path.lagged, path.exact)


@pytest.mark.parametrize("shift", [0.5, 1.0])
def test_shifts_follow_the_changes(shift):
    """With all entries and all clients: mean h <- (1 - shift) mean h + shift * (the change of x)."""
    path = MAKE(LAYERS, 1, None, shift=shift, where=everyone(5, 4, 2))
    before, h = PROBLEM.start, dict.fromkeys(LAYERS, 0.0)
    for x, shifts in zip(path.exact, path.shifts, strict=True):
        h = {name: (1 - shift) * h[name] + shift * (x[name] - before[name]) for name in LAYERS}
        same({name: sum(each[name] for each in shifts) / 5 for name in LAYERS}, h)
        assert not any(each["b"].any() for each in shifts)
        before = x


def masks(r, i, group, name, shape):
    """Indices of a quarter of the entries, by the order of keyed numbers."""
    return np.argsort(BELOW_ONE(r, i, group, name, shape), kind="stable")[: shape[0] // 4]


@pytest.mark.parametrize("scope", ["global", "layer"])
def test_ef21p_lags_by_no_more_than_top_k_allows(scope):
    path = MAKE(LAYERS, Fraction(1, 4), masks, scope=scope)
    before = PROBLEM.start
    for exact, after, sent, broadcast in zip(path.exact, path.lagged, path.sent, path.broadcast, strict=True):
        for names, k in codecs.budgets(PROBLEM.start, LAYERS, Fraction(1, 4), scope):
            d = sum(PROBLEM.start[name].size for name in names)
            here, there, then = (codecs.flat(x, names) for x in (exact, after, before))
            assert k == d // 4
            assert ((here - there) ** 2).sum() <= (1 - k / d) * ((here - then) ** 2).sum() + TOLERANCE
            assert all(np.count_nonzero(codecs.flat(message, names)) == k for message in [*sent, broadcast])
        same(after, exact, ["b"])
        before = after
    assert norm({name: path.exact[-1][name] - path.lagged[-1][name] for name in LAYERS}) > 1e-3


def test_rand_k_scaled_has_the_right_mean():
    """The mean over all choices of one entry is the vector itself."""
    v = np.arange(1.0, 8.0)
    mean = sum(codecs.rand_k(v, np.array([j]), scaled=True) for j in range(7)) / 7
    np.testing.assert_allclose(mean, v, rtol=TOLERANCE)
    np.testing.assert_array_equal(codecs.rand_k(v, v > 5), [0, 0, 0, 0, 0, 6, 7])


def test_top_k_keeps_the_largest_and_of_equals_the_first():
    np.testing.assert_array_equal(codecs.top_k(np.array([1.0, -3, 2, 3, 2, 0]), 3), [0, -3, 2, 3, 0, 0])


def test_budget_of_the_whole_model():
    """What is sent in full is subtracted from the budget first: 1/4 of 63 entries is 15, of which b takes 3."""
    size = PROBLEM.size
    assert codecs.budgets(PROBLEM.start, LAYERS, Fraction(1, 4), of="model") == [(LAYERS, size // 4 - 3)]


def test_binary_mean_and_values():
    """L11: on a uniform grid of n numbers, the share of +alpha is right up to 1/n, and the mean up to 2 alpha/n."""
    n, alpha, u = 2000, 0.4, np.array([-1.0, -0.4, -0.31, 0.0, 0.2, 0.4, 3.0])
    draws = np.stack([codecs.binary(u, alpha, np.full(7, (j + 0.5) / n)) for j in range(n)])
    assert set(np.unique(draws)) == {-alpha, alpha}
    np.testing.assert_allclose(draws.mean(0), np.clip(u, -alpha, alpha), atol=2 * alpha / n)


def test_binary_back_by_hand():
    """b - u/alpha = 1 - 1/2 and -1 + 1/4 inside, the sign outside: 10 (1/2) + 20 (-3/4) - 30 = -40."""
    u, alpha = np.array([0.2, -0.1, -0.9]), 0.4
    by_u, by_alpha = codecs.binary_back(np.array([10.0, 20.0, 30.0]), u, alpha, np.array([0.4, -0.4, -0.4]))
    np.testing.assert_array_equal(by_u, [10, 20, 0])
    assert by_alpha == pytest.approx(-40.0)


def test_alpha_stops_at_its_bounds_and_without_rho():
    assert fedbat.scale(0.01, 0.0, 6.0, (5e-4, 5e-2)) == (0.01, pytest.approx(0.06))
    assert fedbat.scale(0.01, 1.0, 6.0, (5e-4, 5e-2)) == (5e-2, 0.0)
    assert fedbat.scale(0.01, -1.0, 6.0, (5e-4, 5e-2)) == (5e-4, 0.0)
    assert fedbat.scale(0.01, 1.0, 0.0, (5e-4, 5e-2)) == (0.01, 0.0)
    above, below = (fedbat.scale(0.01, 0.1 + step, 6.0, (5e-4, 5e-2))[0] for step in (1e-6, -1e-6))
    slope = fedbat.scale(0.01, 0.1, 6.0, (5e-4, 5e-2))[1]
    assert slope == pytest.approx((above - below) / 2e-6, rel=DIFFERENCE)


def test_fedbat_that_never_switches_is_fedavg():
    """L11."""
    path = play(fedbat.fedbat, LAYERS, BELOW_ONE, phi=1.0, quantise_up=False)
    same_paths(path.x, play(methods.fedavg).x)


def test_fedbat_sends_two_values_a_layer():
    path = play(fedbat.fedbat, LAYERS, BELOW_ONE, rule=rules.Sgd(0.01))
    learnt = {alpha for alphas in path.alphas for each in alphas for alpha in each.values()}
    assert learnt - {5e-4, 5e-2}, "every alpha stands at a bound"
    for sent, alphas in zip(path.sent, path.alphas, strict=True):
        for message, alpha in zip(sent, alphas, strict=True):
            for layer in LAYERS:
                np.testing.assert_allclose(np.abs(message[layer]), alpha[layer], rtol=TOLERANCE, atol=1e-14)
    fixed = play(fedbat.fedbat, LAYERS, BELOW_ONE, phi=1.0, rho=0.0, unswitched=0.01)
    assert all(alpha == {layer: 0.01 for layer in LAYERS} for alphas in fixed.alphas for alpha in alphas)


def test_fedbat_both_ways_with_feedback_loses_nothing():
    """The sum of the broadcasts equals the sum of the means, up to the error that the server still holds."""
    path = play(fedbat.fedbat, LAYERS, BELOW_ONE, down="binary", feedback=True)
    total = {name: PROBLEM.start[name] + path.error[-1][name] * -1 for name in LAYERS}
    for sent in path.sent:
        total = {name: total[name] + sum(message[name] for message in sent) / len(sent) for name in LAYERS}
    same(path.x[-1], total, LAYERS)
    assert all(len(np.unique(np.round(path.x[0][n] - PROBLEM.start[n], 12))) == 2 for n in LAYERS)


def test_bytes_of_codes():
    """The last byte of the bits is padded once; each of 13 indices below 52 takes 6 bits."""
    signs = np.array([1.0, -1, 1, 1, -1, -1, -1, 1, 1])
    assert codecs.pack_signs(signs) == bytes([0b10110001, 0b10000000])
    assert len(codecs.pack_binary({"a": signs, "c": signs, "b": np.zeros(3)}, ["a", "c"])) == 3 + 2 * 4 + 3 * 4
    v = np.random.default_rng(4).normal(size=52)
    packed = codecs.pack_top_k(v, 13)
    assert len(packed) == 13 * 4 + -(-13 * 6 // 8)
    bits = np.unpackbits(np.frombuffer(packed[52:], dtype=np.uint8))[: 13 * 6].reshape(13, 6)
    out = np.zeros(52)
    out[bits @ (1 << np.arange(6)[::-1])] = np.frombuffer(packed[:52], dtype="<f4")
    np.testing.assert_allclose(out, codecs.top_k(v, 13), rtol=1e-7)


def test_fedbat_by_hand():
    """One client, one weight of two entries, K = 2, phi = 1/2, gradient x - 1 at (0, 3), rate 0.1.

    Step 0: u = -0.1 (-1, 2) = (0.1, -0.2), alpha0 = 0.15. Step 1: uniform numbers 0.9 give b = -1 where u/alpha = 2/3
    (probability 5/6 < 0.9) and -1 where u/alpha < -1. The model is (-0.15, 2.85), g = (-1.15, 1.85). u0 moves by
    0.115, u1 stands still beyond alpha. d alpha = -1.15 (-1 - 2/3) + 1.85 (-1) = 1/15; theta = -0.1 rho 0.15 / 15.
    """

    def gradient(i, x, r, k):
        return {"w": x["w"] - 1.0}

    def high(r, i, layer, name, shape):
        return np.full(shape, 0.9)

    start = {"w": np.array([0.0, 3.0])}
    where = ([[0]], {(0, 0): 2})
    arguments = (gradient, start, 1, *where, rules.Sgd(0.1), ["w"], high)
    path = fedbat.fedbat(*arguments, bounds=(1e-3, 1.0))
    alpha = 0.15 * np.exp(6 * -0.1 * 6 * 0.15 / 15)
    assert path.alphas[0][0]["w"] == pytest.approx(alpha, rel=TOLERANCE)
    np.testing.assert_allclose(path.x[0]["w"], start["w"] + [alpha, -alpha], rtol=TOLERANCE)

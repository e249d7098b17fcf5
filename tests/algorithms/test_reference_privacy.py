"""The references of differential privacy against the golden values and the identities of their sources."""

import math

import numpy as np
import pytest

from tests.reference import privacy


def near(value, expected, tol=1e-9):
    np.testing.assert_allclose(value, expected, rtol=0, atol=tol)


def test_joint_clipping_keeps_the_ratio_of_groups():
    message = {"delta": np.array([3.0, 4.0]), "control": np.array([12.0])}
    out, size = privacy.clipped(message, 6.5)
    assert size == 13
    near(np.concatenate(list(out.values())), [1.5, 2, 6])
    assert all(np.array_equal(privacy.clipped(message, 13)[0][name], v) for name, v in message.items())
    scaled, size = privacy.clipped(message, 5, {"control": 0.0})
    assert size == 5
    near(scaled["control"], [12])
    for broken in (math.nan, math.inf, 1e300):
        out = privacy.clipped({"delta": np.array([1.0, broken])}, 1.0)[0]
        assert not out["delta"].any()


def test_shares_clip_each_group_by_itself():
    message = {"delta": np.array([30.0, 40.0]), "control": np.array([0.1])}
    out = privacy.clipped_by_shares(message, 5.0, {"delta": 3, "control": 4})
    near(out["delta"], [1.8, 2.4])
    near(out["control"], [0.1])


def test_golden_values_of_the_quantile():
    near(privacy.model_noise(1, 5), 1.00503782, 0.51e-8)
    near(privacy.model_noise(0.6, 0.5), 0.75)
    near(privacy.quantile([1.0, 2.0], 1.5, 0.0, 0.0)[1], 0.5)
    near(privacy.quantile([1.0, 5.0], 3.0, 0.0, 0.0, target=0.2, lr=0.2), (2.825293600752746, 0.5))


def test_the_quantile_is_found():
    norms = np.random.default_rng(1).lognormal(0, 0.5, size=(200, 50))
    c = 0.1
    for row in norms:
        c = privacy.quantile(row, c, 0.0, 0.0)[0]
    assert abs(c - 1) < 0.05


@pytest.mark.parametrize(
    ("honaker", "t", "expected"),
    [(False, 5, 2), (False, 6, 2), (False, 7, 3), (False, 8, 1), (True, 3, 5 / 3), (True, 4, 4 / 7)],
)
def test_golden_variances_of_trees(honaker, t, expected):
    near(privacy.variances_of_sums(privacy.tree(t, honaker))[-1], expected)


@pytest.mark.parametrize(
    ("rounds", "b", "expected"),
    [(16, 4, 36), (64, 8, 144), (100, 10, 141), (110, 11, 118), (8, 1, 120)],
)
def test_golden_sensitivities_of_trees(rounds, b, expected):
    assert privacy.cyclic_sensitivity2(privacy.tree_encoder(rounds), b) == expected


def test_trees_carry_the_noise_of_their_nodes():
    """The estimates of a tree are unbiased: with no other noise, they give the prefix sums of the nodes' values."""
    for honaker in (False, True):
        noise = privacy.tree(13, honaker)
        near(np.cumsum(noise @ privacy.tree_encoder(13), axis=0), np.tril(np.ones((13, 13))))


def test_golden_values_of_bands():
    near(privacy.root_coefficients(5), [1, 0.5, 0.375, 0.3125, 0.2734375])
    noise, encoder = privacy.banded(16, 4)
    near(np.mean(privacy.variances_of_sums(noise)), 3.768239, 0.51e-6)
    near(privacy.cyclic_sensitivity2(encoder, 4), 4)
    near(np.mean(privacy.variances_of_sums(privacy.banded(64, 8)[0])), 7.395301, 0.51e-6)
    near(np.mean(privacy.variances_of_sums(privacy.banded(16, 1)[0])), 8.5)
    optimised = [0.794875, 0.438433, 0.329274, 0.259862]
    near(np.mean(privacy.variances_of_sums(privacy.banded(16, 4, optimised)[0])), 3.754024, 2e-6)


def test_golden_values_of_banded_inverses():
    noise, encoder = privacy.banded_inverse(16, 4)
    near(noise[:4, 0], [1, -1 / 2, -1 / 8, -1 / 16])
    near(privacy.banded_inverse(8, 5)[0][4, 0], -5 / 128)
    near(np.mean(privacy.variances_of_sums(noise)), 1.912842, 0.51e-6)
    near(privacy.cyclic_sensitivity2(encoder, 4), 9.668451, 0.51e-6)


@pytest.mark.parametrize(("rounds", "b"), [(9, 3), (10, 4)])
def test_regular_participation_is_the_worst(rounds, b):
    for encoder in (privacy.banded(rounds, b)[1], privacy.banded_inverse(rounds, 3)[1]):
        near(privacy.sensitivity(encoder, b) ** 2, privacy.cyclic_sensitivity2(encoder, b))


def test_golden_values_of_accounting_in_closed_form():
    near(privacy.gaussian_epsilon(1e-6, 4.530877117), 0.9273923, 1e-7)
    near(50 * privacy.poisson_rdp(0.01, 2.5, 5), 2.1807565623e-3, 1e-12)
    orders = range(2, 64)
    divergences = [2250 * privacy.poisson_rdp(0.04, 1.5, order) for order in orders]
    near(privacy.rdp_epsilon(orders, divergences, 1e-5), 7.3298767738347, 1e-9)

"""Epsilon against the numbers of dp-accounting, of other libraries and of closed forms."""

import math

import numpy as np
import pytest

from fedfleet.engine.privacy.accounting import Releases, Sequence, calibrate, epsilon, last_round
from tests.reference import privacy

pytest.importorskip("dp_accounting")


def near(value, expected, tol):
    np.testing.assert_allclose(value, expected, rtol=0, atol=tol)


def poisson(t, q, z):
    return Releases(t, z, rate=q)


@pytest.mark.parametrize(
    ("releases", "delta", "kind", "adjacency", "expected", "tol"),
    [
        (poisson(2250, 0.04, 1.5), 1e-5, "rdp", "add_or_remove", 7.32933470, 1e-7),
        (poisson(2249, 0.04, 1.5), 1e-5, "pld", "add_or_remove", 6.767051, 4e-3),
        (poisson(512, 0.1, 3), 1e-6, "pld", "add_or_remove", 3.76969, 2e-3),
        (poisson(100, 0.05, 1), 1e-5, "rdp", "add_or_remove", 4.04, 5e-3),
        (poisson(100, 0.05, 1), 1e-5, "pld", "add_or_remove", 3.50, 5e-3),
        (Releases(100, 0.5, subset=(50, 1000)), 1e-5, "rdp", "replace", 34.26, 5e-3),
        (Releases(100, 1.0, subset=(50, 1000)), 1e-5, "rdp", "replace", 6.47, 5e-3),
        (poisson(10, 0.1, 2), 1e-5, "rdp", "zero_out", 0.935505, 1e-6),
        (poisson(10, 0.1, 2), 1e-5, "pld", "zero_out", 0.798468, 2e-3),
        (Releases(1, 1.13 / math.sqrt(11)), 1e-6, "rdp", "zero_out", 18.7096, 1e-4),
        (Releases(1, 1.13 / math.sqrt(11)), 1e-6, "pld", "zero_out", 17.6668, 1e-4),
        (Releases(1, 8.83 / math.sqrt(11)), 1e-6, "rdp", "zero_out", 1.7732, 1e-4),
        (Releases(1, 8.83 / math.sqrt(11)), 1e-6, "pld", "zero_out", 1.6487, 1e-3),
        (Releases(1, 7 / math.sqrt(79)), 1e-10, "rdp", "zero_out", 8.8986, 1e-4),
        (Releases(1, 4.530877117), 1e-6, "rdp", "add_or_remove", 1.0000003, 1e-7),
    ],
)
def test_golden_values(releases, delta, kind, adjacency, expected, tol):
    near(epsilon(releases, delta, kind, adjacency), expected, tol)


@pytest.mark.parametrize("kind", ["rdp", "pld"])
def test_epsilon_is_that_of_the_library(kind):
    """Epsilon equals that of the same releases, which are written here for dp-accounting by hand."""
    import dp_accounting as da
    from dp_accounting.pld import PLDAccountant
    from dp_accounting.rdp import RdpAccountant

    relation = da.NeighboringRelation.ADD_OR_REMOVE_ONE
    made = RdpAccountant(neighboring_relation=relation) if kind == "rdp" else PLDAccountant(relation, 1e-3)
    for _ in range(7):
        made.compose(da.PoissonSampledDpEvent(0.05, da.GaussianDpEvent(0.9)))
    near(epsilon(poisson(7, 0.05, 0.9), 1e-5, kind, "add_or_remove"), made.get_epsilon(1e-5), 1e-6)


def test_one_gaussian_release_in_closed_form():
    for z in (0.7, 2.0, 9.0):
        exact = privacy.gaussian_epsilon(1e-6, z)
        for adjacency in ("add_or_remove", "zero_out"):
            near(epsilon(Releases(1, z), 1e-6, "pld", adjacency), exact, 2e-3)
        assert epsilon(Releases(1, z), 1e-6, "rdp", "zero_out") > exact


def test_unsampled_releases_add_up():
    near(epsilon(Releases(9, 6.0), 1e-5, "pld", "zero_out"), epsilon(Releases(1, 2.0), 1e-5, "pld", "zero_out"), 1e-12)


def test_poisson_samples_at_integer_orders():
    """The epsilon of the library is at most the smallest epsilon over integer orders, and near to it."""
    orders = range(2, 256)
    for t, q, z in ((50, 0.01, 2.5), (2250, 0.04, 1.5)):
        divergences = [t * privacy.poisson_rdp(q, z, order) for order in orders]
        bound = privacy.rdp_epsilon(orders, divergences, 1e-5)
        assert bound - 0.02 < epsilon(poisson(t, q, z), 1e-5, "rdp", "add_or_remove") <= bound + 1e-9


def test_calibrated_noise():
    def of(rounds, kind):
        return lambda z: epsilon(poisson(rounds, 0.04, z), 1e-5, kind, "add_or_remove")

    for rounds, kind, z in ((2250, "rdp", 1.41587), (2250, "pld", 1.34590)):
        found = calibrate(8.0, of(rounds, kind))
        near(found, z, 4e-4 if kind == "pld" else 2e-5)
        assert 8 * (1 - 1e-3) <= of(rounds, kind)(found) <= 8


def test_calibration_to_a_target_out_of_reach():
    with pytest.raises(ValueError, match="no noise below"):
        calibrate(1.0, lambda z: 2.0)
    assert calibrate(1.0, lambda z: 0.0) == pytest.approx(0.05, rel=2e-5)


def test_rounds_of_a_budget():
    def spent(t):
        return epsilon(poisson(t, 0.1, 3), 1e-6, "pld", "add_or_remove")

    assert last_round(2.0, 512, spent) == 155
    assert last_round(2.0, 100, spent) == 100
    assert last_round(1e-3, 100, spent) == 0
    assert spent(155) <= 2 < spent(156)


@pytest.mark.parametrize("kind", ["rdp", "pld"])
def test_noise_that_differs_from_round_to_round(kind):
    constant = Sequence(lambda t: poisson(1, 0.1, 1.5), 1e-5, kind, "add_or_remove")
    near(
        [constant.epsilon(t) for t in (0, 3, 8)],
        [0, *(epsilon(poisson(t, 0.1, 1.5), 1e-5, kind, "add_or_remove") for t in (3, 8))],
        1e-6,
    )
    falling = Sequence(lambda t: poisson(1, 0.1, 1.5 / t), 1e-5, kind, "add_or_remove")
    once = [falling.epsilon(t) for t in (1, 2, 3)]
    assert once == sorted(once)
    resumed = Sequence(lambda t: poisson(1, 0.1, 1.5 / t), 1e-5, kind, "add_or_remove")
    assert resumed.epsilon(3) == once[2]
    assert falling.epsilon(2) == once[1]


def test_epsilon_rises_with_rounds_and_falls_with_noise():
    spent = [epsilon(poisson(t, 0.1, 1.0), 1e-5, "pld", "add_or_remove") for t in (0, 1, 2, 4)]
    assert spent[0] == 0
    assert spent == sorted(spent)
    assert epsilon(poisson(4, 0.1, 0.0), 1e-5, "pld", "add_or_remove") == math.inf
    assert epsilon(poisson(4, 0.1, 1.1), 1e-5, "pld", "add_or_remove") < spent[3]

"""Noise mechanisms against the matrices of their references: their recursions are run on unit vectors in place of
random draws."""

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree

from fedfleet.algorithms.privacy.banded import Banded, BandedInverse, mean_variance, optimised
from fedfleet.algorithms.privacy.binary_tree import BinaryTree, squared_sensitivity
from fedfleet.algorithms.privacy.gaussian import Gaussian
from tests.reference import privacy

ROUNDS = 16


class Units:
    """Unit vectors in place of draws: the noise of round t that a mechanism makes of them is the row t - 1 of its
    matrix, the coefficients on all draws."""

    def __init__(self, size):
        self.size, self.places = size, {}

    def __call__(self, purpose, *where):
        place = self.places.setdefault((purpose, *where), len(self.places))
        return [torch.eye(self.size, dtype=torch.float64)[place]]


def matrix(mechanism, rounds=ROUNDS, keep=lambda state: state):
    """(R, draws): the coefficients of the noise of each round. `keep`: function that is applied to the state between
    rounds."""
    draw = Units(4 * rounds)
    state = mechanism.init([torch.zeros(draw.size, dtype=torch.float64)], rounds)
    rows = []
    for t in range(1, rounds + 1):
        noise, state = mechanism.noise(t, draw, keep(state))
        rows.append(noise[0].clone())
    return torch.stack(rows).numpy()


CASES = {
    "gaussian": (Gaussian(), np.eye(ROUNDS)),
    "tree": (BinaryTree(), privacy.tree(ROUNDS, True)),
    "plain tree": (BinaryTree(honaker=False), privacy.tree(ROUNDS, False)),
    "banded 1": (Banded(1), np.eye(ROUNDS)),
    "banded 4": (Banded(4), privacy.banded(ROUNDS, 4)[0]),
    "banded 16": (Banded(16), privacy.banded(ROUNDS, 16)[0]),
    "optimised": (Banded(4, "optimised"), privacy.banded(ROUNDS, 4, optimised(4, ROUNDS))[0]),
    "banded_inverse": (BandedInverse(4), privacy.banded_inverse(ROUNDS, 4)[0]),
}


@pytest.mark.parametrize("name", CASES)
def test_covariances_are_those_of_the_reference(name):
    mechanism, reference = CASES[name]
    found = matrix(mechanism)
    np.testing.assert_allclose(found @ found.T, reference @ reference.T, atol=1e-12)
    for t in (1, 2, 7, 8, 12, ROUNDS):
        np.testing.assert_allclose(mechanism.deviation(t, ROUNDS), np.linalg.norm(reference[t - 1]), atol=1e-12)


@pytest.mark.parametrize("rounds", [1, 3, 13])
def test_runs_of_other_lengths(rounds):
    for honaker in (False, True):
        found, reference = matrix(BinaryTree(honaker), rounds), privacy.tree(rounds, honaker)
        np.testing.assert_allclose(found @ found.T, reference @ reference.T, atol=1e-12)
    found, reference = matrix(Banded(5), rounds), privacy.banded(rounds, 5)[0]
    np.testing.assert_allclose(found @ found.T, reference @ reference.T, atol=1e-12)


def test_the_state_before_a_round_is_not_changed_by_it():
    """A round that is given up does not change the state of the last committed round."""
    for mechanism in (BinaryTree(), Banded(4), Banded(1)):
        draw = Units(80)
        state = mechanism.init([torch.zeros(80, dtype=torch.float64)], 8)
        for t in range(1, 8):
            kept = pytree.tree_map(torch.clone, state)
            first, after = mechanism.noise(t, draw, state)
            for a, b in zip(pytree.tree_leaves(state), pytree.tree_leaves(kept), strict=True):
                assert torch.equal(a, b)
            assert torch.equal(mechanism.noise(t, draw, state)[0][0], first[0])
            state = after


@pytest.mark.parametrize(
    ("rounds", "b", "expected"),
    [(16, 4, 36), (64, 8, 144), (100, 10, 141), (110, 11, 118), (2000, 314, 87), (8, 1, 120), (1600, 1600, 11)],
)
def test_golden_sensitivities_of_trees(rounds, b, expected):
    assert squared_sensitivity(rounds, b) == expected


def test_sensitivities_after_every_round():
    for t in range(1, 20):
        for b in (1, 3, 4, 7):
            assert squared_sensitivity(t, b) == privacy.cyclic_sensitivity2(privacy.tree_encoder(t), b)
            found = BandedInverse(4).composition(t, b, 20)
            expected = privacy.cyclic_sensitivity2(privacy.banded_inverse(t, min(4, t))[1], b) if t >= 4 else None
            if expected:
                np.testing.assert_allclose(found.sensitivity**2, expected, rtol=1e-12)
            assert not found.sampled
        if t >= 4:
            assert Banded(4).composition(t, 4, 20).times == -(-t // 4)
            np.testing.assert_allclose(privacy.cyclic_sensitivity2(privacy.banded(t, 4)[1], 4), -(-t // 4), rtol=0.6)


def test_golden_values_of_optimised_bands():
    np.testing.assert_allclose(optimised(4, 16), [0.794875, 0.438433, 0.329274, 0.259862], atol=2e-4)
    np.testing.assert_allclose(mean_variance(optimised(4, 16), 16), 3.754024, atol=1e-6)
    np.testing.assert_allclose(mean_variance(optimised(8, 64), 64), 7.096762, atol=1e-5)


def test_settings_that_do_not_fit():
    with pytest.raises(ValueError, match="bands <= separation must hold, got bands=12, separation=11; lower bands"):
        Banded(12).check(20, 11)
    for kind in (Banded, BandedInverse):
        with pytest.raises(ValueError, match="bands >= 1 must hold"):
            kind(0)

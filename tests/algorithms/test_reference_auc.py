"""T1: the closed forms of the square-loss AUC objective, against the loss itself. float64 sums of 40 terms: 1e-12."""

import numpy as np
import pytest

from tests.reference import auc
from tests.reference.minimax import local_sgda

ROUNDING = 1e-12
RATIOS = (0.05, 0.05, 0.08, 0.1, 0.12, 0.15, 0.2, 0.25)


@pytest.fixture
def scored():
    rng = np.random.default_rng(4)
    positive = np.arange(40) % 5 == 0
    return rng.uniform(size=40) + 0.3 * positive, positive


def slopes(f, at, step=1e-5):
    """Central differences; f is quadratic, so only rounding, about 1e-11, is left."""
    moves = step * np.eye(len(at))
    return np.array([(f(at + move) - f(at - move)) / (2 * step) for move in moves])


@pytest.mark.parametrize("prior", [0.2, 0.35])
def test_gradient(scored, prior):
    h, positive = scored
    at = np.array([0.4, 0.1, -0.3])
    dh, dw = auc.gradient(h, positive, at, prior)
    np.testing.assert_allclose(dw, slopes(lambda w: auc.loss(h, positive, w, prior), at), atol=1e-9)
    np.testing.assert_allclose(dh, slopes(lambda s: auc.loss(s, positive, at, prior), h), atol=1e-9)


@pytest.mark.parametrize("prior", [None, 0.35])
def test_saddle_and_curvature(scored, prior):
    h, positive = scored
    best, used = auc.saddle(h, positive, prior), auc.share(positive) if prior is None else prior
    np.testing.assert_allclose(auc.gradient(h, positive, best, used)[1], 0.0, atol=ROUNDING)
    for place, curvature in enumerate(auc.curvatures(positive, used)):
        off = best + 0.5 * np.eye(3)[place]
        np.testing.assert_allclose(auc.gradient(h, positive, off, used)[1][place], 0.5 * curvature, rtol=ROUNDING)


def test_value(scored):
    h, positive = scored
    at_saddle = auc.loss(h, positive, auc.saddle(h, positive), auc.share(positive))
    np.testing.assert_allclose(auc.value(h, positive), at_saddle, rtol=ROUNDING)
    np.testing.assert_allclose(auc.pairwise(h, positive), at_saddle, rtol=ROUNDING)
    assert auc.saddle(h, positive)[2] < 0, "ranked right, w3* is negative"


def test_aucm_is_the_same_objective(scored):
    h, positive = scored
    w1, w2, w3 = 0.7, -0.2, 0.45
    prior = auc.share(positive)
    expected = auc.loss(h, positive, (w1, w2, w3), prior) + prior * (1 - prior)
    np.testing.assert_allclose(auc.aucm(h, positive, w1, w2, 1 + w3, prior), expected, rtol=ROUNDING)


def test_pooled_prior():
    assert round(auc.pooled_prior(RATIOS), 5) == 0.13039
    assert auc.pooled_prior([0.1] * 8) == pytest.approx(0.1, rel=ROUNDING)


def test_descent_ascent_finds_the_saddle(scored):
    """Two clients of equal size with different shares of positives and one prior reach the saddle of all data. The
    smallest curvature is 0.32."""
    h, positive = scored
    chosen = np.isin(np.arange(40), [*np.flatnonzero(positive)[:6], *np.flatnonzero(~positive)[:14]])
    blocks = (chosen, ~chosen)
    prior = auc.share(positive)

    def gradient(i, z, r, k):
        part = blocks[i]
        _, slope = auc.gradient(h[part], positive[part], list(z.values()), prior)
        return dict(zip(z, slope, strict=True))

    assert positive[blocks[0]].mean() != positive[blocks[1]].mean()
    start = {"primal.w1": 0.0, "primal.w2": 0.0, "dual.w3": 0.0}
    cohorts, steps = [[0, 1]] * 200, {(r, i): 1 for r in range(200) for i in range(2)}
    path = local_sgda(gradient, start, 2, cohorts, steps, lr=(0.5, 0.5))
    found = [float(path.x[-1][n]) for n in start]
    np.testing.assert_allclose(found, auc.saddle(h, positive), atol=1e-9)

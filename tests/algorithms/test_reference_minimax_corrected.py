"""Identities of the slow minimax methods with control variates and a frozen momentum. ROUNDING as in
`test_reference_minimax`."""

import numpy as np
import pytest

from tests.algorithms.problems import Quadratic, everyone
from tests.algorithms.saddles import Saddle
from tests.algorithms.test_reference_minimax import (
    FULL,
    LR,
    NOISY,
    ONE,
    ROUNDING,
    SOME,
    equal,
    group,
    play,
    points,
    same,
)
from tests.reference import variance_reduced
from tests.reference.minimax import sagda
from tests.reference.minimax_corrected import fed_nsgda_m, fed_sgda_clip, fedmuon_da, polar, unit
from tests.reference.trees import add, norm, times

BETA, GAMMA = (0.3, 0.6), (0.2, 0.3)
EVEN = (SOME[0], dict.fromkeys(SOME[1], 3))
SIZES = {"lr": LR, "gamma": GAMMA, "beta": BETA}
FROZEN = pytest.mark.parametrize("method", [fed_nsgda_m, fedmuon_da, fed_sgda_clip], ids=lambda m: m.__name__)


@FROZEN
def test_directions_average_to_the_momentum(method):  # T2
    path = play(method, NOISY, FULL, **SIZES)
    for shared, own in zip(path.shared, path.own, strict=True):
        equal(shared["directions"], shared["momentum"])
        equal(shared["control"], {n: sum(h[n] for h in own) / 5 for n in shared["control"]})


BOUNDS = {fed_nsgda_m: (1.0, 1.0), fedmuon_da: (np.sqrt(3 + 1 + 1), np.sqrt(2 + 1))}


@pytest.mark.parametrize("timetable", [FULL, SOME], ids=["all", "some"])
@pytest.mark.parametrize("method", BOUNDS, ids=lambda m: m.__name__)
def test_moves_are_bounded(method, timetable):  # T3
    asked = []

    def gradient(i, z, r, k):
        asked.append((r, k, z))
        return NOISY.gradient(i, z, r, k)

    path = method(gradient, NOISY.start, 5, *timetable, **SIZES)
    before = [NOISY.start, *path.x[:-1]]
    for dual in (False, True):
        bound = BOUNDS[method][dual]
        for old, new in zip(before, path.x, strict=True):
            assert norm(group(add(new, old, -1.0), dual)) <= GAMMA[dual] * bound + ROUNDING
        for r, k, z in asked:
            assert norm(group(add(z, before[r], -1.0), dual)) <= k * LR[dual] * bound + ROUNDING


def test_one_normalised_step_has_length_gamma():  # T3
    path = play(fed_nsgda_m, ONE, everyone(1, 6, 1), **SIZES)
    for old, new in zip([ONE.start, *path.x[:-1]], path.x, strict=True):
        lengths = [norm(group(add(new, old, -1.0), dual)) for dual in (False, True)]
        np.testing.assert_allclose(lengths, GAMMA, rtol=ROUNDING)


@pytest.mark.parametrize("timetable", [FULL, SOME], ids=["all", "some"])
@pytest.mark.parametrize("method", [fed_nsgda_m, fedmuon_da])
def test_scale_of_gradients_is_of_no_matter(method, timetable):  # T4
    def larger(i, z, r, k):
        return times(NOISY.gradient(i, z, r, k), 8.0)

    same(play(method, NOISY, timetable, **SIZES), method(larger, NOISY.start, 5, *timetable, **SIZES))


@pytest.mark.parametrize("shape", [(6, 1), (6,)])
def test_muon_on_one_column_is_normalised(shape):  # T5
    problem = Saddle(shapes=(("primal.W", shape), ("dual.w", (1, 1))))
    same(play(fedmuon_da, problem, FULL, **SIZES), play(fed_nsgda_m, problem, FULL, **SIZES))


def test_numbers_step_by_sign():  # T5
    np.testing.assert_array_equal([unit(np.array(u)) for u in (-3.0, 0.0, 0.2)], [-1.0, 0.0, 1.0])
    np.testing.assert_array_equal([polar(np.full((1, 1), u)).item() for u in (-3.0, 0.0, 0.2)], [-1.0, 0.0, 1.0])


@pytest.mark.parametrize("server_lr", [(1.0, 1.0), (0.7, 1.3)])
@pytest.mark.parametrize("timetable", [FULL, EVEN], ids=["all", "some"])
def test_unclipped_is_sagda(timetable, server_lr):  # T6
    gamma = tuple(g * lr * 3 for g, lr in zip(server_lr, LR, strict=True))
    free = {"beta": (1.0, 1.0), "tau": (np.inf, np.inf)}
    clip = play(fed_sgda_clip, NOISY, timetable, lr=LR, gamma=gamma, **free)
    same(clip, play(sagda, NOISY, timetable, lr=LR, server_lr=server_lr))


@pytest.mark.parametrize("timetable", [FULL, SOME], ids=["all", "some"])
def test_always_clipped_is_normalised(timetable):  # T7
    tau = (1e-4, 2e-4)
    clip = play(fed_sgda_clip, NOISY, timetable, lr=(100.0, 200.0), gamma=(1000.0, 2000.0), beta=BETA, tau=tau)
    same(clip, play(fed_nsgda_m, NOISY, timetable, lr=(0.01, 0.04), gamma=(0.1, 0.4), beta=BETA))


@FROZEN
def test_fused_downlink(method):  # T14
    same(play(method, NOISY, SOME, fused=True, **SIZES), play(method, NOISY, SOME, **SIZES))


@FROZEN
def test_plain_averaging_is_gamma_of_k_steps(method):
    usual = play(method, NOISY, EVEN, lr=LR, gamma=(3 * LR[0], 3 * LR[1]), beta=BETA)
    same(usual, play(method, NOISY, EVEN, lr=LR, beta=BETA))


def test_a_client_with_more_steps_counts_as_much_or_more():
    """Two clients have the constant slopes 3 and -0.5, and take 1 and 3 normalised steps of 0.1, which end at -0.1 and
    0.3. Divided by each client's own K: 0.2 / 0.1 * (-0.1 / 1 + 0.3 / 3) / 2 = 0. Divided by the mean K, which is 2:
    0.2 / 0.1 * (-0.05 + 0.15) / 2 = 0.1.
    """
    timetable = ([[0, 1]], {(0, 0): 1, (0, 1): 3})
    for per, end in (("own", 0.0), ("mean", 0.1)):
        path = fed_nsgda_m(
            lambda i, z, r, k: {"primal.x": np.array([(3.0, -0.5)[i]])},
            {"primal.x": np.zeros(1)},
            2,
            *timetable,
            lr=(0.1, 0.0),
            gamma=(0.2, 0.0),
            per=per,
        )
        np.testing.assert_allclose(path.x[0]["primal.x"], end, atol=ROUNDING)


@FROZEN
def test_steps_of_line_11(method):
    """K is each client's own or the mean: the same with equal steps, different with unequal ones; eta alone never
    matters."""
    for timetable, alike in ((EVEN, True), (SOME, False)):
        one, other = (points(play(method, NOISY, timetable, per=per, **SIZES)) for per in ("own", "mean"))
        assert np.allclose(one, other, rtol=ROUNDING, atol=ROUNDING) == alike


def test_polar_factors():  # T15
    rng = np.random.default_rng(0)
    for shape in ((4, 6), (6, 4), (5, 5)):
        u = rng.normal(size=shape)
        exact = polar(u)
        np.testing.assert_allclose(np.linalg.svd(exact, compute_uv=False), 1.0, rtol=1e-12)
        np.testing.assert_allclose(polar(exact), exact, atol=1e-12)
        np.testing.assert_allclose(np.sum(exact * u), np.linalg.svd(u, compute_uv=False).sum(), rtol=1e-12)
        near = np.linalg.svd(polar(u, "jordan"), compute_uv=False)
        assert near.min() > 0.5
        assert near.max() < 1.5


def test_without_dual_normalised_is_padamfed():
    problem = Quadratic()
    other = play(variance_reduced.padamfed, problem, FULL, lr=LR[0], gamma=0.2, beta=0.3, start="zeros")
    same(play(fed_nsgda_m, problem, FULL, **SIZES), other)

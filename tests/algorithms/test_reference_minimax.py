"""The slow minimax reference: it finds saddles, and its methods equal each other where their equations say so.

ROUNDING: float64 rounds at 1e-16, a path of 6 rounds of up to 4 steps adds about 1e3 roundings of values near 1, and a
division by the norm of a direction (above 1e-2 here) or an SVD amplifies them by up to 1e2: 1e-10.
"""

from functools import partial as fixed

import numpy as np
import pytest

from tests.algorithms.problems import Quadratic, everyone, flatten, partial
from tests.algorithms.saddles import Saddle
from tests.reference import methods, rules, variance_reduced
from tests.reference.minimax import fed_sgda_m, fess_gda, is_dual, local_sgda, local_sgdam, move, sagda
from tests.reference.minimax_corrected import fed_nsgda_m, fed_sgda_clip, fedmuon_da
from tests.reference.trees import add, times

ROUNDING = 1e-10
LR = (0.05, 0.1)
NOISY, QUIET, ONE = Saddle(), Saddle(noise=0.0), Saddle(clients=1)
FULL = everyone(5, 6, 3)
SOME = partial()
SOLE = everyone(1, 6, 3)


def play(method, problem, timetable, **settings):
    return method(problem.gradient, problem.start, problem.clients, *timetable, **settings)


def points(path):
    return np.stack([flatten(z) for z in path.x])


def same(one, other, tolerance=ROUNDING):
    a, b = points(one), points(other)
    np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)
    assert not np.allclose(a[0], a[-1], atol=1e-3), "nothing moved"


def equal(tree, other):
    np.testing.assert_allclose(flatten(tree), flatten(other), rtol=ROUNDING, atol=ROUNDING)


def group(z, dual):
    return {n: value for n, value in z.items() if is_dual(n) == dual}


# --- saddles ----------------------------------------------------------------------------------------------------------
def distance(path, problem):
    return np.linalg.norm(points(path)[-1] - problem.saddle)


EXACT = {
    "local_sgda": (fixed(local_sgda, lr=(0.1, 0.1)), 1),
    "local_sgdam": (fixed(local_sgdam, lr=(1.0, 1.0), alpha=0.1, b=(3.0, 3.0)), 1),
    "fed_sgda_m": (fixed(fed_sgda_m, lr=(0.1, 0.1), a=(0.3, 0.3)), 1),
    "fess_gda": (fixed(fess_gda, lr=(0.1, 0.1), rho=1.0, beta=0.5), 1),
    "sagda": (fixed(sagda, lr=(0.05, 0.05)), 4),
    "fed_sgda_clip": (fixed(fed_sgda_clip, lr=(0.05, 0.05), tau=(1.0, 1.0)), 4),
}


@pytest.mark.parametrize("name", EXACT)
def test_saddle_without_noise(name):
    method, steps = EXACT[name]
    assert distance(play(method, QUIET, everyone(5, 600, steps)), QUIET) < 1e-6


@pytest.mark.parametrize(("method", "width"), [(fed_nsgda_m, 2), (fedmuon_da, 5)])
def test_steps_of_fixed_length_circle_at_their_own_scale(method, width):
    """A round moves x by at most gamma sqrt(sum of ranks), so the last models stay within a few such lengths of the
    saddle."""
    far = np.linalg.norm(flatten(QUIET.start) - QUIET.saddle)
    for gamma in (0.05, 0.0125):
        path = play(method, QUIET, everyone(5, 600, 2), lr=(gamma / 2,) * 2, gamma=(gamma,) * 2)
        assert distance(path, QUIET) < 2 * width * gamma < far


def test_local_steps_bias_local_sgda_but_not_sagda():  # T16
    stalled = [distance(play(local_sgda, QUIET, everyone(5, rounds, 4), lr=(0.1, 0.1)), QUIET) for rounds in (400, 800)]
    assert stalled[0] > 1e-2
    np.testing.assert_allclose(*stalled, rtol=1e-6)
    assert distance(play(sagda, QUIET, everyone(5, 400, 4), lr=(0.1, 0.1)), QUIET) < 1e-6


# --- the others -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("server_lr", [(1.0, 1.0), (0.7, 1.3)])
def test_plain_cases_are_local_sgda(server_lr):  # T8, T11
    plain = play(local_sgda, NOISY, SOME, lr=LR, server_lr=server_lr)
    same(play(fess_gda, NOISY, SOME, lr=LR, rho=0.0, beta=0.4, server_lr=server_lr), plain)
    for problem, timetable in ((ONE, SOLE), (Saddle(alike=True), FULL)):
        plain = play(local_sgda, problem, timetable, lr=LR, server_lr=server_lr)
        same(play(sagda, problem, timetable, lr=LR, server_lr=server_lr), plain)


def one_sample_later(problem, steps):
    """The same problem, in which step k of round r gets the sample before its own: (r, k - 1), or that of the warm
    start at first."""

    def gradient(i, z, r, k):
        before = (r, k - 1) if k else (r - 1, steps - 1 if r else 0)
        return problem.gradient(i, z, *before)

    return gradient


def test_momentum_of_the_last_gradient_is_local_sgda():  # T9, T10
    shifted = one_sample_later(ONE, 3)
    lr = (0.5 * LR[0], 0.5 * LR[1])
    plain = local_sgda(shifted, ONE.start, 1, *SOLE, lr=lr)
    same(play(local_sgdam, ONE, SOLE, lr=LR, alpha=0.5, b=(2.0, 2.0)), plain)
    same(play(fed_sgda_m, ONE, SOLE, lr=lr, a=(1.0, 1.0)), plain)
    same(play(fed_sgda_m, ONE, SOLE, lr=lr, a=(1.0, 1.0), order="estimate"), play(local_sgda, ONE, SOLE, lr=lr))


def test_starts_and_previous_points_of_alike_clients():
    """With one client, or equal clients, it does not matter which client a gradient or a point comes from."""
    for problem, timetable in ((ONE, SOLE), (Saddle(alike=True), FULL)):
        momentum = fixed(play, local_sgdam, problem, timetable, lr=LR, alpha=0.5, b=(0.4, 1.2))
        same(momentum(start="own"), momentum())
        storm = fixed(play, fed_sgda_m, problem, timetable, lr=LR, a=(0.3, 0.6))
        for order in ("move", "estimate"):
            same(storm(order=order, previous="own"), storm(order=order))


@pytest.mark.parametrize("momentum", [local_sgdam, fed_sgda_m])
def test_averaged_directions_lag_by_one_exchange(momentum):  # T9, T10 for N > 1
    """By hand, with one step per round, weight 1 on the new gradient and no noise: z2 moves along the mean of g_i(z1),
    and so on. With two steps, the first step of round 1 is along gradients at the clients' own points, not at their
    mean."""
    weights = {"alpha": 1.0, "b": (1.0, 1.0)} if momentum is local_sgdam else {"a": (1.0, 1.0)}
    plain = play(local_sgda, QUIET, everyone(5, 3, 1), lr=LR)
    same(play(momentum, QUIET, everyone(5, 3, 1), lr=LR, **weights), plain)
    start = QUIET.start
    first = [QUIET.gradient(i, start, 0, 0) for i in range(5)]
    common = move(start, {n: sum(g[n] for g in first) / 5 for n in start}, LR)
    ends = [move(common, QUIET.gradient(i, common, 0, 0), LR) for i in range(5)]
    z = {n: sum(end[n] for end in ends) / 5 for n in start}
    d = {n: sum(QUIET.gradient(i, end, 0, 0)[n] for i, end in enumerate(ends)) / 5 for n in start}
    own = [move(move(z, d, LR), QUIET.gradient(i, move(z, d, LR), 0, 0), LR) for i in range(5)]
    path = play(momentum, QUIET, everyone(5, 2, 2), lr=LR, **weights)
    equal(path.x[0], z)
    equal(path.x[1], {n: sum(end[n] for end in own) / 5 for n in start})
    assert not np.allclose(points(path), points(play(local_sgda, QUIET, everyone(5, 2, 2), lr=LR)), atol=1e-6)


@pytest.mark.parametrize("a", [(0.0, 0.0), (0.3, 0.6)])
@pytest.mark.parametrize("order", ["move", "estimate"])
def test_storm_on_full_gradients_is_exact(order, a):  # T10: u = g at every point, whatever a
    quiet = Saddle(clients=1, noise=0.0)
    path = play(fed_sgda_m, quiet, SOLE, lr=LR, a=a, order=order)
    same(path, play(local_sgda, quiet, SOLE, lr=LR))
    for shared in path.shared:
        equal(shared["estimator"], quiet.gradient(0, shared["previous"], 0, 0))


def test_uplink_of_sagda_can_be_one():  # T12
    cohorts = [[r % 5] for r in range(8)]
    timetable = (cohorts, dict.fromkeys(((r, i) for r in range(8) for i in range(5)), 3))
    path, eta_g = play(sagda, NOISY, timetable, lr=LR, server_lr=(0.5, 0.7)), (0.5, 0.7)
    zero = times(NOISY.start, 0.0)
    z, v, own = NOISY.start, zero, [zero] * 5
    for cohort, new, shared, kept in zip(cohorts, path.x, path.shared, path.own, strict=True):
        i = cohort[0]
        slope = move(zero, add(new, z, -1.0), tuple(1 / (3 * g * lr) for g, lr in zip(eta_g, LR, strict=True)))
        equal({n: own[i][n] - v[n] + slope[n] for n in v}, kept[i])
        z, v, own = new, shared["control"], kept
        equal(v, {n: sum(v_i[n] for v_i in own) / 5 for n in v})


def test_smoothing_contracts():  # T13
    zero = times(NOISY.start, 0.0)
    centre = {n: value - 1.0 for n, value in NOISY.start.items()}
    path = fess_gda(
        lambda i, z, r, k: zero, NOISY.start, 5, *FULL, lr=LR, rho=0.8, beta=0.3, server_lr=(0.5, 1.0), centre=centre
    )
    factor = (1 - 0.3) * (1 - 0.05 * 0.5 * 3 * 0.8)
    for r, (z, shared) in enumerate(zip(path.x, path.shared, strict=True)):
        for n, c in shared["centre"].items():
            np.testing.assert_allclose(z[n] - c, factor ** (r + 1), rtol=ROUNDING)
        equal(group(z, True), group(NOISY.start, True))


def test_smoothing_by_hand():
    """One client, f = x y, two steps of (0.1, 0.2) from (1, 1), centre 3, rho 2, beta 0.5, server rates (0.5, 2).

    x: 1, 0.9, 0.78; y: 1, 1.2, 1.38. The server's pull is 0.1 * 0.5 * 2 * 2 * (1 - 3) = -0.4, at the x of before:
    x+ = 1 + 0.5 (-0.22) + 0.4 = 1.29; y+ = 1 + 2 (0.38) = 1.76; c+ = 3 + 0.5 (1.29 - 3) = 2.145. A box of 1.5 leaves
    the local steps alone and cuts y+.
    """
    start = {"primal.x": np.array([1.0]), "dual.y": np.array([1.0])}
    settings = {"lr": (0.1, 0.2), "rho": 2.0, "beta": 0.5, "server_lr": (0.5, 2.0), "centre": {"primal.x": [3.0]}}

    def gradient(i, z, r, k):
        return {"primal.x": z["dual.y"], "dual.y": z["primal.x"]}

    for box, y in ((2.0, 1.76), (1.5, 1.5)):
        cut = {"project": lambda dual, box=box: {"dual.y": np.minimum(dual["dual.y"], box)}}
        path = fess_gda(gradient, start, 1, [[0]], {(0, 0): 2}, **settings, **cut)
        equal(path.x[0], {"primal.x": [1.29], "dual.y": [y]})
        equal(path.shared[0]["centre"], {"primal.x": [2.145]})


def test_control_variates_from_a_second_cohort():
    """All clients take their gradients at the server's point, so v = mean g, and one local step of each client is the
    server's own step."""
    cohorts, steps = everyone(5, 1, 1)
    path = play(sagda, NOISY, ([[2]], steps), lr=LR, controls=cohorts)
    g = [NOISY.gradient(i, NOISY.start, 0, 0) for i in range(5)]
    equal(path.x[0], move(NOISY.start, {n: sum(h[n] for h in g) / 5 for n in g[0]}, LR))


def test_projection():
    def box(y):
        return {n: np.clip(value, -0.1, 0.1) for n, value in y.items()}

    for method in (local_sgda, fixed(fess_gda, rho=0.1, beta=0.5)):
        path = play(method, NOISY, SOME, lr=LR, project=box)
        assert max(np.abs(value).max() for z in path.x for value in group(z, True).values()) <= 0.1
        same(path, play(method, NOISY, SOME, lr=LR, project=lambda y: box(box(y))))


# --- without a dual they are minimisation -----------------------------------------------------------------------------
@pytest.mark.parametrize("timetable", [FULL, SOME], ids=["all", "some"])
def test_without_dual(timetable):
    problem = Quadratic()
    sgd = rules.Sgd(0.05)
    same(play(local_sgda, problem, timetable, lr=LR), play(methods.fedavg, problem, timetable, rule=sgd))
    scaffold = play(methods.scaffold, problem, timetable, rule=sgd, server_lr=0.7)
    same(play(sagda, problem, timetable, lr=LR, server_lr=(0.7, 0.0)), scaffold)


@pytest.mark.parametrize(("previous", "prev"), [("own", "own"), ("averaged", "server")])
def test_without_dual_storm_is_stem(previous, prev):
    """Both orders; if the estimate comes first it is STEM, here with changing rates."""

    def rates(t):
        return 0.3 / t**0.5, 0.1 / t**0.3

    problem = Quadratic()
    other = play(variance_reduced.stem, problem, SOME, rates=rates, start="zeros", prev=prev)
    own = {"lr": lambda t: (rates(t + 1)[1],) * 2, "a": lambda t: (rates(t + 1)[0],) * 2}
    same(play(fed_sgda_m, problem, SOME, order="estimate", start="zeros", previous=previous, **own), other)

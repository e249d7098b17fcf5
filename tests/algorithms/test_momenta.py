"""Methods with shared momenta, averaged momenta or proximal terms: against the slow reference, and identities.

Tolerances as in `test_trajectories` (TOLERANCE, trajectories) and `test_identities` (ROUNDING).
"""

import numpy as np
import pytest
import torch

from fedfleet.algorithms.fedavg import fedavg
from fedfleet.algorithms.fedavg_m import fedavg_m
from fedfleet.algorithms.fedavg_vr import fedavg_vr
from fedfleet.algorithms.fedprox import fedprox
from fedfleet.algorithms.local_adaalter import local_adaalter
from fedfleet.algorithms.local_sgdm import local_sgdm
from fedfleet.algorithms.parts.rules import Adam, Momentum, Sgd
from fedfleet.algorithms.scaffold import scaffold
from fedfleet.algorithms.scaffold_m import scaffold_m
from fedfleet.algorithms.scaffold_vr import scaffold_vr
from tests.algorithms.driver import arrays, run, tree
from tests.algorithms.problems import Line, Logistic, Quadratic, everyone, partial
from tests.algorithms.test_identities import close, equal, paths
from tests.algorithms.test_stationary import biased_point
from tests.reference import rules
from tests.reference import variance_reduced as reference

TOLERANCE, ROUNDING = 1e-9, 1e-12
COHORTS, STEPS = partial()
PROBLEMS = {"quadratic": Quadratic(), "logistic": Logistic()}
SHARED_MOMENTUM = {"fedavg_m": fedavg_m, "fedavg_vr": fedavg_vr, "scaffold_m": scaffold_m, "scaffold_vr": scaffold_vr}
STARTS = pytest.mark.parametrize("start", ["zeros", "gradient"])
METHODS = pytest.mark.parametrize("name", SHARED_MOMENTUM)


@pytest.fixture(params=PROBLEMS)
def problem(request):
    return PROBLEMS[request.param]


def slow(method, problem, *arguments, timetable=(COHORTS, STEPS), **settings):
    return method(problem.gradient, problem.start, problem.clients, *timetable, *arguments, **settings)


def same(fast, expected, what):
    for name, value in arrays(fast).items():
        np.testing.assert_allclose(value, expected[name], rtol=TOLERANCE, atol=TOLERANCE, err_msg=f"{what}, {name}")


def agree(result, expected, shared, own):
    """Compare a run with the reference. shared: name -> function that reads it from the public state; own: function
    from a client's state to its tree, or None."""
    for model, x in zip(result.models(), expected.x, strict=True):
        same(model, x, "x")
    first = next(iter(expected.x[0]))
    assert not np.allclose(expected.x[0][first], expected.x[-1][first], atol=1e-4), "nothing moved"
    for server, vectors in zip(result.servers, expected.shared, strict=bool(shared)):
        for name, of in shared.items():
            same(of(server.public), vectors[name], name)
    if own:
        for clients, trees in zip(result.clients, expected.own, strict=True):
            for client, kept in zip(clients, trees, strict=True):
                same(own(client), kept, "own")


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("server_lr", [1.0, 0.7])
def test_local_sgdm(problem, nesterov, server_lr):
    fast = run(local_sgdm(0.05, 0.8, nesterov, server_lr), problem, COHORTS, STEPS)
    expected = slow(reference.local_sgdm, problem, 0.05, 0.8, nesterov, server_lr)
    agree(fast, expected, {"u": lambda public: public.carried}, None)


@pytest.mark.parametrize(("eps", "b0"), [(1.0, 0.0), (0.3, 0.8)])
def test_local_adaalter(problem, eps, b0):
    fast = run(local_adaalter(0.2, eps, b0), problem, COHORTS, STEPS)
    expected = slow(reference.local_adaalter, problem, 0.2, eps, b0)
    agree(fast, expected, {"squares": lambda public: public.squares}, None)


@pytest.mark.parametrize(
    ("fast", "plain"), [(Sgd(0.1), rules.Sgd(0.1)), (Adam(0.03), rules.Adam(0.03))], ids=["sgd", "adam"]
)
def test_fedprox(problem, fast, plain):
    result = run(fedprox(0.4, fast, 0.7), problem, COHORTS, STEPS)
    agree(result, slow(reference.fedprox, problem, plain, 0.4, 0.7), {}, None)


def vectors(name):
    """Name in the reference -> function that reads the same vector from the public state."""
    found = {"momentum": lambda public: public.momentum}
    if "scaffold" in name:
        found["control"] = lambda public: public.control
    if name.endswith("vr"):
        found["previous"] = lambda public: public.previous
    return found


@STARTS
@pytest.mark.parametrize("gamma", [None, 0.15])
@METHODS
def test_shared_momentum(problem, name, gamma, start):
    fast = run(SHARED_MOMENTUM[name](Sgd(0.1), 0.3, gamma, None if gamma else 0.8, start), problem, COHORTS, STEPS)
    expected = slow(reference.shared_momentum, problem, name, 0.1, 0.3, gamma, 0.8, start)
    agree(fast, expected, vectors(name), (lambda client: client) if "scaffold" in name else None)


@METHODS
def test_shared_momentum_with_another_rule_sends_the_mean_direction(problem, name):
    fast = run(SHARED_MOMENTUM[name](Momentum(0.03, 0.8), 0.3), problem, COHORTS, STEPS)
    expected = slow(reference.shared_momentum, problem, name, 0.03, 0.3, rule=rules.Momentum(0.03, 0.8))
    agree(fast, expected, vectors(name), None)


# --- identities -------------------------------------------------------------------------------------------------------
def even(rounds=6, sampled=3, steps=3):
    cohorts, counts = partial(rounds=rounds, sampled=sampled)
    return cohorts, dict.fromkeys(counts, steps)


def test_no_pull_is_fedavg():
    for rule in (Sgd(0.1), Momentum(0.05), Adam(0.03)):
        equal(fedprox(0.0, rule), fedavg(rule))


def test_no_momentum_is_fedavg():
    for nesterov in (False, True):
        equal(local_sgdm(0.1, 0.0, nesterov), fedavg(Sgd(0.1)))


@pytest.mark.parametrize("nesterov", [False, True])
def test_local_sgdm_with_one_step_is_minibatch_momentum_sgd(nesterov):
    problem, timetable = Quadratic(), everyone(5, 8, 1)
    x, u = tree(problem.start), tree(problem.start).zeros()
    for r in range(8):
        gradients = [tree(problem.gradient(i, arrays(x), r, 0)) for i in range(5)]
        g = sum(gradients[1:], gradients[0]) / 5
        u = u * 0.8 + g
        x = x - 0.1 * (u * 0.8 + g if nesterov else u)
    last = run(local_sgdm(0.1, 0.8, nesterov), problem, *timetable).models()[-1]
    torch.testing.assert_close(last.flat, x.flat, rtol=ROUNDING, atol=ROUNDING)


def test_local_sgdm_of_one_client_is_momentum_sgd():
    """Three rounds of four steps are twelve steps of momentum SGD, which a client of FedAvg that keeps its momentum
    takes too."""
    problem = Quadratic(clients=1, noise=0.0)
    split = run(local_sgdm(0.1, 0.8), problem, *everyone(1, 3, 4)).models()[-1].flat
    whole = run(fedavg(Momentum(0.1, 0.8)), problem, *everyone(1, 1, 12)).models()[-1].flat
    torch.testing.assert_close(split, whole, rtol=ROUNDING, atol=ROUNDING)


def test_averaging_commutes_with_steps_on_a_common_hessian():
    """All F_i have the same second derivative: 12 steps end at the same model, however they are divided into rounds."""
    line = Line(h=(0.7, 0.7), a=(0.0, 2.0), at=5.0)
    ends = [run(local_sgdm(0.1, 0.8), line, *everyone(2, 12 // k, k)).models()[-1].flat for k in (1, 3, 12)]
    torch.testing.assert_close(ends[0], ends[1], rtol=ROUNDING, atol=ROUNDING)
    torch.testing.assert_close(ends[0], ends[2], rtol=ROUNDING, atol=ROUNDING)


@pytest.mark.parametrize("server_lr", [1.0, 0.6])
@METHODS
def test_all_weight_on_the_new_gradient(name, server_lr):
    """With beta = 1 the methods equal FedAvg or SCAFFOLD with the server step gamma / (lr K)."""
    plain = scaffold(Sgd(0.1), server_lr) if "scaffold" in name else fedavg(Sgd(0.1), server_lr)
    close(SHARED_MOMENTUM[name](Sgd(0.1), 1.0, server_lr=server_lr), plain, timetable=even())
    close(SHARED_MOMENTUM[name](Sgd(0.1), 1.0, gamma=server_lr * 0.1 * 3), plain, timetable=even())


@pytest.mark.parametrize(("simple", "controlled"), [(fedavg_m, scaffold_m), (fedavg_vr, scaffold_vr)])
def test_controls_cancel(simple, controlled):
    """With one client, c_i = c. With one local step and all clients, the corrections cancel in the mean."""
    close(simple(Sgd(0.1), 0.3), controlled(Sgd(0.1), 0.3), Quadratic(clients=1), everyone(1, 6, 3))
    for start in ("zeros", "gradient"):
        close(simple(Sgd(0.1), 0.3, start=start), controlled(Sgd(0.1), 0.3, start=start), timetable=everyone(5, 8, 1))


def mean_gradient(problem, x, r):
    gradients = [tree(problem.gradient(i, arrays(x), r, 0)) for i in range(problem.clients)]
    return sum(gradients[1:], gradients[0]) / problem.clients


def ends_at(method, x, problem=Quadratic(), rounds=8):
    last = run(method, problem, *everyone(problem.clients, rounds, 1)).models()[-1]
    torch.testing.assert_close(last.flat, x.flat, rtol=ROUNDING, atol=ROUNDING)


@pytest.mark.parametrize("lr", [0.001, 0.1, 10.0])
def test_fedavg_m_with_one_step_is_averaged_momentum_sgd(lr):
    """The method does not depend on the local step size then, and it also equals the heavy-ball form."""
    problem = Quadratic()
    x = ball = before = tree(problem.start)
    g = x.zeros()
    for r in range(8):
        g = g * 0.7 + 0.3 * mean_gradient(problem, x, r)
        x = x - 0.2 * g
        ball, before = ball - 0.2 * 0.3 * mean_gradient(problem, ball, r) + 0.7 * (ball - before), ball
    # lr = 0.001 divides a displacement by lr: it costs three digits
    last = run(fedavg_m(Sgd(lr), 0.3, gamma=0.2), problem, *everyone(5, 8, 1)).models()[-1]
    torch.testing.assert_close(last.flat, x.flat, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(ball.flat, x.flat, rtol=ROUNDING, atol=ROUNDING)


def test_fedavg_vr_with_one_step_is_storm():
    problem = Quadratic()
    x = before = tree(problem.start)
    g = x.zeros()
    for r in range(8):
        g = mean_gradient(problem, x, r) + 0.7 * (g - mean_gradient(problem, before, r))
        x, before = x - 0.2 * g, x
    ends_at(fedavg_vr(Sgd(0.1), 0.3, gamma=0.2), x)


def test_fedavg_vr_keeps_the_exact_gradient():
    """With exact gradients, one step and a warm start, G is always the gradient at x_prev, and x makes gradient
    descent."""
    problem = Quadratic(noise=0.0)
    x = tree(problem.start)
    for r in range(8):
        x = x - 0.2 * mean_gradient(problem, x, r)
    ends_at(fedavg_vr(Sgd(0.1), 0.3, gamma=0.2, start="gradient"), x, problem)


@pytest.mark.parametrize("gamma", [None, 0.15])
@pytest.mark.parametrize("name", ["fedavg_vr", "scaffold_vr"])
def test_the_previous_model_is_x_plus_gamma_g(name, gamma):
    cohorts, steps = partial()
    result = run(SHARED_MOMENTUM[name](Sgd(0.1), 0.3, gamma), Quadratic(), cohorts, steps)
    for r, server in enumerate(result.servers):
        size = gamma or 0.1 * np.mean([steps[r, i] for i in cohorts[r]])
        rebuilt = server.public.x.add(server.public.momentum, float(size))
        torch.testing.assert_close(server.public.previous.flat, rebuilt.flat, rtol=1e-11, atol=1e-11)


@STARTS
@pytest.mark.parametrize("name", ["scaffold_m", "scaffold_vr"])
def test_c_is_the_mean_of_all_c_i(name, start):
    result = run(SHARED_MOMENTUM[name](Sgd(0.1), 0.3, start=start), Quadratic(), *partial(rounds=12))
    for server, clients in zip(result.servers, result.clients, strict=True):
        own = torch.stack([client.flat for client in clients]).mean(0)
        torch.testing.assert_close(server.public.control.flat, own, rtol=ROUNDING, atol=ROUNDING)


@METHODS
def test_displacements_and_directions_give_one_momentum(name):
    """The rule Momentum with mu = 0 takes plain steps, but with it clients send the mean direction."""
    close(SHARED_MOMENTUM[name](Sgd(0.1), 0.3), SHARED_MOMENTUM[name](Momentum(0.1, 0.0), 0.3))


# --- where they come to rest ------------------------------------------------------------------------------------------
SMALL = Quadratic(clients=3, noise=0.0, small=True)


@pytest.mark.parametrize("beta", [0.3, 1.0])
@pytest.mark.parametrize("name", ["scaffold_m", "scaffold_vr"])
def test_scaffolds_reach_the_optimum(name, beta):
    x = run(SHARED_MOMENTUM[name](Sgd(0.1), beta), SMALL, *everyone(3, 400, 4)).models()[-1].flat.numpy()
    np.testing.assert_allclose(x, SMALL.optimum, rtol=0, atol=1e-12)


@pytest.mark.parametrize("beta", [0.3, 1.0])
def test_fedavg_vr_rests_at_fedavgs_biased_point(beta):
    x = run(fedavg_vr(Sgd(0.1), beta), SMALL, *everyone(3, 400, 4)).models()[-1].flat.numpy()
    np.testing.assert_allclose(x, biased_point(SMALL, [4, 4, 4]), rtol=0, atol=1e-12)
    assert np.linalg.norm(x - SMALL.optimum) > 0.02


def test_fedavg_m_rests_at_the_biased_point_of_a_smaller_step():
    """G = 0 at rest, so local steps have the size beta lr, and the bias is smaller for smaller beta."""
    x = run(fedavg_m(Sgd(0.2), 0.5), SMALL, *everyone(3, 500, 4)).models()[-1].flat.numpy()
    np.testing.assert_allclose(x, biased_point(SMALL, [4, 4, 4]), rtol=0, atol=1e-12)


# By hand; all numbers are dyadic: F_1 = x^2/2, F_2 = (x - 2)^2, so g_1 = x, g_2 = 2 (x - 2), from x = 1.
HAND = Line(h=(1.0, 2.0), a=(0.0, 2.0), at=1.0)


def test_scaffold_m_by_hand():
    """Two clients, two local steps, lr = 1/2, beta = 1/2, one round, all zero at first: u = g/2.

    client 1: g = 1, u = 1/2, y = 3/4; g = 3/4, u = 3/8, y = 9/16       c_1 = 7/8    mean of u 7/16
    client 2: g = -2, u = -1, y = 3/2; g = -1, u = -1/2, y = 7/4        c_2 = -3/2   mean of u -3/4
    G = -5/32; x = 1 + (1/2) (2) (5/32) = 37/32; c = (7/8 - 3/2)/2 = -5/16
    """
    result = run(scaffold_m(Sgd(0.5), 0.5), HAND, *everyone(2, 1, 2))
    public = result.servers[0].public
    assert [float(t.flat) for t in (public.x, public.momentum, public.control)] == [37 / 32, -5 / 32, -5 / 16]
    assert [float(client.flat) for client in result.clients[0]] == [7 / 8, -3 / 2]


def test_local_adaalter_by_hand():
    """Two clients, two local steps, lr = 1, eps^2 = 4, b0 = 0, one round from x = 1.

    client 1: F = x^2/2, g = 1, y = 1 - 1/sqrt(4) = 1/2; g = 1/2, y = 1/2 - (1/2)/sqrt(8)     A2 = 1 + 1/4 = 5/4
    client 2: F = (x - 2)^2, g = -2, y = 1 + 2/sqrt(4) = 2; g = 0, y = 2                      A2 = 4
    x = 5/4 - 1/(8 sqrt(2)), B2 = 21/8
    """
    public = run(local_adaalter(1.0, 2.0), HAND, *everyone(2, 1, 2)).servers[0].public
    assert float(public.x.flat) == pytest.approx(5 / 4 - 1 / (8 * 2**0.5), rel=1e-15)
    assert float(public.squares.flat) == 21 / 8


def test_variance_reduction_changes_the_path():
    for pair in ((fedavg_m, fedavg_vr), (scaffold_m, scaffold_vr)):
        one, other = paths(*(method(Sgd(0.1), 0.3) for method in pair))
        assert (one - other).abs().max() > 1e-3


BAD = [
    (fedprox, {"mu": -0.5}, "mu >= 0 must hold, got mu=-0.5"),
    (local_adaalter, {"eps": 0.0}, "eps > 0 must hold, got eps=0.0"),
    (local_adaalter, {"b0": -1.0}, "b0 >= 0 must hold, got b0=-1.0"),
    (local_sgdm, {"mu": 1.0}, "mu < 1 must hold, got mu=1.0"),
    *[(method, {"beta": 0.0}, "0 < beta <= 1 must hold, got beta=0.0") for method in SHARED_MOMENTUM.values()],
    (fedavg_m, {"gamma": -1.0}, "gamma > 0 must hold, got gamma=-1.0"),
    (fedavg_m, {"gamma": 1.0, "rule": Momentum()}, "gamma needs the rule sgd, got gamma=1.0"),
    (scaffold_m, {"server_lr": 0.0}, "server_lr > 0 must hold, got server_lr=0.0"),
    (scaffold_vr, {"start": "warm"}, "start must be zeros or gradient, got 'warm'"),
]


@pytest.mark.parametrize(("method", "settings", "message"), BAD)
def test_bad_settings_are_refused(method, settings, message):
    with pytest.raises(ValueError, match=r"must|needs") as refused:
        method(**settings)
    assert message in str(refused.value)

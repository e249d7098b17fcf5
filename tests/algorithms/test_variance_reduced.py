"""PAdaMFed, STEM and FAFED: against the slow reference, and identities.

Tolerances as in `test_trajectories` (TOLERANCE, trajectories) and `test_identities` (ROUNDING).
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
import torch

from fedfleet.algorithms.contract import RunContext
from fedfleet.algorithms.fafed import Fafed, Step, fafed
from fedfleet.algorithms.fedavg import fedavg
from fedfleet.algorithms.padamfed import padamfed
from fedfleet.algorithms.padamfed_vr import padamfed_vr
from fedfleet.algorithms.parts.rules import Sgd
from fedfleet.algorithms.parts.shared_momentum import ServerStep, SharedMomentum
from fedfleet.algorithms.scaffold_m import scaffold_m
from fedfleet.algorithms.scaffold_vr import scaffold_vr
from fedfleet.algorithms.stem import stem
from fedfleet.algorithms.tree import Tree
from tests.algorithms.driver import arrays, run, tree, visit
from tests.algorithms.problems import Line, Logistic, Quadratic, everyone, partial
from tests.algorithms.test_identities import close, paths
from tests.algorithms.test_momenta import agree, even, mean_gradient, slow
from tests.reference import variance_reduced as reference

ROUNDING = 1e-12
COHORTS, STEPS = partial(rounds=8)
CONTEXT = RunContext(cohort=3, clients=5, rounds=8, steps=3)
PROBLEMS = {"quadratic": Quadratic(), "logistic": Logistic()}
STARTS = pytest.mark.parametrize("start", ["zeros", "gradient"])


@pytest.fixture(params=PROBLEMS)
def problem(request):
    return PROBLEMS[request.param]


def expected(method, problem, **settings):
    return slow(method, problem, timetable=(COHORTS, STEPS), **settings)


# --- PAdaMFed ---------------------------------------------------------------------------------------------------------
SIZES = {"lr": 0.05, "gamma": 0.2, "beta": 0.3}
PADAMFED = {
    "padamfed": (padamfed, {}, {}),
    "padamfed_vr": (padamfed_vr, {}, {"reduced": True, "momentum": "direction_mean"}),
    "padamfed_vr plain": (padamfed_vr, {"momentum": "plain"}, {"reduced": True, "momentum": "plain"}),
}
KINDS = pytest.mark.parametrize("kind", PADAMFED)


def build(kind, **settings):
    method, more, _ = PADAMFED[kind]
    return method(**more, **settings).build(CONTEXT)


@STARTS
@KINDS
def test_padamfed(problem, kind, start):
    fast = run(build(kind, **SIZES, start=start), problem, COHORTS, STEPS)
    plain = expected(reference.padamfed, problem, **SIZES, start=start, **PADAMFED[kind][2])
    found = {"momentum": lambda public: public.momentum, "control": lambda public: public.control}
    if "vr" in kind:
        found["previous"] = lambda public: public.previous
    agree(fast, plain, found, lambda client: client)


@pytest.mark.parametrize("rounds", [4, 9, 300])
@pytest.mark.parametrize(("name", "method"), [("padamfed", padamfed), ("padamfed_vr", padamfed_vr)])
def test_sizes_follow_from_the_plan(name, method, rounds):
    built = method().build(RunContext(7, 20, rounds, 5))
    sizes = (built.rule.lr, built.server.gamma, built.direction.beta)
    np.testing.assert_allclose(sizes, reference.free(name, 7, 5, rounds), rtol=1e-14)


def test_sizes_can_be_given():
    built = padamfed(lr=0.3, server_lr=0.5).build(CONTEXT)
    assert (built.rule.lr, built.server.gamma, built.server.lr) == (0.3, None, 0.5)
    assert built.direction.beta == padamfed().parameter_free(3, 3, 8).beta
    epochs = CONTEXT._replace(steps=None)
    assert padamfed(**SIZES).build(epochs) == padamfed(**SIZES).build(CONTEXT)
    with pytest.raises(ValueError, match=r"lr, gamma and beta must be given with federation\.local\.epochs"):
        padamfed(lr=0.1).build(epochs)


@KINDS
def test_server_lr_applies_the_mean_displacement(kind):
    """gamma = server_lr lr K."""
    given = {"lr": 0.05, "beta": 0.3}
    one = build(kind, **given, server_lr=0.7)
    close(one, build(kind, **given, gamma=0.7 * 0.05 * 3), timetable=even())


@dataclass(frozen=True)
class Louder(Quadratic):
    """A problem whose losses are multiplied by 16, a power of two, so that gradients scale exactly."""

    def gradient(self, i, x, r, k):
        return {name: 16.0 * value for name, value in super().gradient(i, x, r, k).items()}


@STARTS
@KINDS
def test_padamfed_does_not_feel_the_scale_of_the_loss(kind, start):
    method = build(kind, **SIZES, start=start)
    cohorts, steps = partial()
    one, other = (run(method, p, cohorts, steps).models()[-1].flat for p in (Quadratic(), Louder()))
    torch.testing.assert_close(one, other, rtol=ROUNDING, atol=ROUNDING)


@KINDS
def test_padamfed_moves_by_gamma_at_most(kind):
    result = run(build(kind, **SIZES), Quadratic(), COHORTS, STEPS)
    models = [tree(Quadratic().start), *result.models()]
    for before, after in pairwise(models):
        assert float((after - before).norm()) <= SIZES["gamma"] * (1 + ROUNDING)


@KINDS
def test_a_client_moves_by_lr_k_at_most(kind):
    problem, method = Quadratic(), build(kind, **SIZES)
    public = method.broadcast(method.server_init(tree(problem.start)))
    oracles = [lambda y, k=k: tree(problem.gradient(0, arrays(y), 0, k)) for k in range(4)]
    message, _ = visit(method, public, method.client_init(public), oracles)
    assert 0 < float(message.facts["norm2"]) ** 0.5 <= SIZES["lr"] * 4 * (1 + ROUNDING)


@pytest.mark.parametrize("start", ["zeros", "gradient"])
def test_padamfed_of_one_client_and_step_is_normalised_momentum_sgd(start):
    """The direction u = beta g + (1 - beta) G is the next G, so a step is along the new momentum."""
    problem = Quadratic(clients=1)
    x = tree(problem.start)
    g = mean_gradient(problem, x, -1) if start == "gradient" else x.zeros()
    for r in range(8):
        g = g * 0.7 + 0.3 * mean_gradient(problem, x, r)
        x = x - 0.2 * g / g.norm()
    last = run(build("padamfed", **SIZES, start=start), problem, *everyone(1, 8, 1)).models()[-1]
    torch.testing.assert_close(last.flat, x.flat, rtol=1e-11, atol=1e-11)


@STARTS
@KINDS
def test_without_the_normaliser_it_is_scaffold_with_momentum(kind, start):
    method = build(kind, **SIZES, start=start)
    plain = SharedMomentum(method.direction, Sgd(0.1), ServerStep(0.15, 1.0, method.server.momentum), start)
    other = scaffold_vr if "vr" in kind else scaffold_m
    one, two = paths(plain, other(Sgd(0.1), 0.3, gamma=0.15, start=start))
    assert bool((one - two).abs().max() < ROUNDING) == (kind != "padamfed_vr plain")


def test_direction_mean_is_plain_without_variance_reduction():
    method = build("padamfed", **SIZES)
    directions = SharedMomentum(method.direction, method.rule, ServerStep(0.2, 1.0, "directions"), "gradient")
    close(method, directions)
    one, two = paths(build("padamfed_vr", **SIZES), build("padamfed_vr plain", **SIZES))
    assert (one - two).abs().max() > 1e-3


def test_all_weight_on_the_new_gradient_needs_no_reduction():
    sizes = {**SIZES, "beta": 1.0}
    close(build("padamfed", **sizes), build("padamfed_vr", **sizes))
    close(build("padamfed", **sizes), build("padamfed_vr plain", **sizes))


@KINDS
def test_c_is_the_mean_of_all_c_i(kind):
    result = run(build(kind, **SIZES), Quadratic(), COHORTS, STEPS)
    for server, clients in zip(result.servers, result.clients, strict=True):
        own = torch.stack([client.flat for client in clients]).mean(0)
        torch.testing.assert_close(server.public.control.flat, own, rtol=ROUNDING, atol=ROUNDING)


# --- STEM and FAFED ---------------------------------------------------------------------------------------------------
def point(client):
    return client.point


def constant(lr, a):
    return lambda t: (a, lr)


def decaying(kappa, w, sigma2, c):
    """eta_t = kappa / (w + sigma2 t)^(1/3); a_t = c / kappa^2 eta_{t-1}^2."""

    def rates(t):
        eta = kappa / (w + sigma2 * t) ** (1 / 3)
        last = kappa / (w + sigma2 * (t - 1)) ** (1 / 3) if t else 0.0
        return min(1.0, c / kappa**2 * last**2), eta

    return rates


RATES = {
    "constant": ({"lr": 0.1, "a": 0.3}, constant(0.1, 0.3)),
    "stem": ({"lr": 0.3, "schedule": "stem", "w": 2.0, "sigma2": 0.5, "c": 1.8}, decaying(0.3, 2.0, 0.5, 1.8)),
}


@STARTS
@pytest.mark.parametrize("previous", ["own", "server"])
@pytest.mark.parametrize("rates", RATES)
def test_stem(problem, rates, previous, start):
    settings, plain = RATES[rates]
    fast = run(stem(**settings, start=start, previous=previous), problem, COHORTS, STEPS)
    slowly = expected(reference.stem, problem, rates=plain, start=start, prev=previous)
    agree(fast, slowly, {"direction": lambda public: public.direction}, point if previous == "own" else None)


def test_stem_with_a_first_step_of_its_own(problem):
    fast = run(stem(0.1, 0.3, first_lr=0.02), problem, COHORTS, STEPS)
    slowly = expected(reference.stem, problem, rates=constant(0.1, 0.3), first=0.02)
    agree(fast, slowly, {"direction": lambda public: public.direction}, point)


@STARTS
@pytest.mark.parametrize("previous", ["own", "server"])
@pytest.mark.parametrize("first", ["plain", "preconditioned"])
def test_fafed(problem, first, previous, start):
    settings = {"lr": 0.05, "alpha": 0.3, "beta": 0.9, "rho": 0.5, "first": first, "start": start}
    settings["previous"] = previous
    given = {**settings, "first": None if start == "zeros" else first}  # without a start's step there is no first one
    fast = run(fafed(**given), problem, COHORTS, STEPS)
    found = {"m": lambda public: public.moments.first, "v": lambda public: public.moments.second}
    agree(fast, expected(reference.fafed, problem, **settings), found, point if previous == "own" else None)
    for server in fast.servers:
        assert float(server.public.moments.second.flat.min()) >= 0


FLAT = {"rho": 1.0, "beta": 1.0, "start": "zeros"}
"""With these settings v stays 0, so A = 1."""


def test_all_weight_on_the_new_gradient_is_fedavg():
    """With start = "zeros", which takes no step before the first round."""
    close(stem(0.1, 1.0, start="zeros"), fedavg(Sgd(0.1)))
    close(fafed(0.1, 1.0, **FLAT), fedavg(Sgd(0.1)))


def test_all_weight_on_the_new_gradient_is_fedavg_after_the_first_step():
    problem = Quadratic()
    moved = arrays(tree(problem.start) - 0.1 * mean_gradient(problem, tree(problem.start), -1))

    class Later(Quadratic):
        start = moved

    cohorts, steps = partial()
    ours = run(stem(0.1, 1.0), problem, cohorts, steps).models()[-1].flat
    torch.testing.assert_close(
        ours, run(fedavg(Sgd(0.1)), Later(), cohorts, steps).models()[-1].flat, rtol=ROUNDING, atol=ROUNDING
    )


@dataclass(frozen=True)
class Unit(Step):
    """A step without a preconditioner: A = 1 whatever v is."""

    def along(self, m: Tree, v: Tree) -> Tree:
        return m * self.lr


@STARTS
@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0])
def test_fafed_without_the_preconditioner_is_stem(weight, start):
    for previous in ("own", "server"):
        close(Fafed(Unit(0.1), weight, 0.9, start, previous=previous), stem(0.1, weight, start, previous))
    close(fafed(0.1, weight, **FLAT), stem(0.1, weight, "zeros"))


@pytest.mark.parametrize("counts", [(8, 1), (2, 4)])
def test_stem_of_one_client_is_storm(counts):
    """Eight steps d <- g(x) + (1 - a) (d - g(x_prev)) on one batch, x <- x - lr d, however they are divided into
    rounds."""
    problem, (rounds, k) = Quadratic(clients=1), counts
    before = tree(problem.start)
    d = mean_gradient(problem, before, -1)
    x = before - 0.1 * d
    for t in range(rounds * k):
        here, there = (tree(problem.gradient(0, arrays(at), t // k, t % k)) for at in (x, before))
        d = here + 0.7 * (d - there)
        x, before = x - 0.1 * d, x
    for previous in ("own", "server"):
        last = run(stem(0.1, 0.3, previous=previous), problem, *everyone(1, rounds, k)).models()[-1]
        torch.testing.assert_close(last.flat, x.flat, rtol=ROUNDING, atol=ROUNDING)


def test_fafed_of_one_client_is_preconditioned_storm():
    """With beta = 1, v stays the square of the first gradient."""
    problem = Quadratic(clients=1)
    before = tree(problem.start)
    d = mean_gradient(problem, before, -1)
    scale = Tree(d.flat.abs() + 0.5, d.layout)
    x = before - 0.1 * d
    for t in range(12):
        here, there = (tree(problem.gradient(0, arrays(at), t // 3, t % 3)) for at in (x, before))
        d = here + 0.7 * (d - there)
        x, before = x - 0.1 * (d / scale), x
    last = run(fafed(0.1, 0.3, 1.0, 0.5), problem, *everyone(1, 4, 3)).models()[-1]
    torch.testing.assert_close(last.flat, x.flat, rtol=ROUNDING, atol=ROUNDING)


def test_stem_that_only_corrects_is_gradient_descent():
    """With a = 0, one client and no noise, the differences of gradients form a telescoping sum, so that d is the exact
    gradient."""
    problem = Quadratic(clients=1, noise=0.0)
    x = tree(problem.start)
    for _ in range(9):
        x = x - 0.1 * mean_gradient(problem, x, 0)
    last = run(stem(0.1, 0.0), problem, *everyone(1, 2, 4)).models()[-1]
    torch.testing.assert_close(last.flat, x.flat, rtol=ROUNDING, atol=ROUNDING)


def test_stem_with_one_step_has_one_point_for_all():
    """With one local step p_i is x before the last step, the same for all clients: it does not matter where it is
    kept."""
    close(stem(0.1, 0.3, previous="own"), stem(0.1, 0.3, previous="server"), timetable=everyone(5, 8, 1))
    one, two = paths(stem(0.1, 0.3, previous="own"), stem(0.1, 0.3, previous="server"), timetable=everyone(5, 8, 3))
    assert (one - two).abs().max() > 1e-4


@pytest.mark.parametrize("method", [stem(), fafed()], ids=["stem", "fafed"])
def test_rounds_are_counted_in_integers(method):
    """States may be stored as bfloat16, in which 256 + 1 is 256: after round 256, no client would count as one that
    took part in the round before."""
    assert method.client_init(method.server_init(tree(Quadratic().start)).public).number.dtype == torch.int64


def test_a_client_that_returns_begins_at_x():
    """Then p_i = x, so its first direction is a g + (1 - a) d. Client 0 does not take part in round 2, and is alone in
    round 3."""
    problem, (cohorts, steps) = Quadratic(), ([[0, 1], [1, 2], [0]], {(r, i): 1 for r in range(3) for i in range(5)})
    result = run(stem(0.1, 0.3), problem, cohorts, steps)
    before, after = result.servers[1].public, result.servers[2].public
    g = tree(problem.gradient(0, arrays(before.x), 2, 0))
    d = 0.3 * g + 0.7 * before.direction
    torch.testing.assert_close(after.direction.flat, d.flat, rtol=ROUNDING, atol=ROUNDING)
    torch.testing.assert_close(after.x.flat, (before.x - 0.1 * d).flat, rtol=ROUNDING, atol=ROUNDING)


# By hand; all numbers are dyadic: F_1 = x^2/2, F_2 = (x - 2)^2, so g_1 = x, g_2 = 2 (x - 2), from x = 1.
HAND = Line(h=(1.0, 2.0), a=(0.0, 2.0), at=1.0)


def test_stem_by_hand():
    """lr = a = 1/2, two clients, two steps, one round.

    start: g_1 = 1, g_2 = -2, d = -1/2, p = 1, x = 1 + 1/4 = 5/4
    client 1: g = 5/4, g' = 1, d = 5/4 + (-1/2 - 1)/2 = 1/2, y = 1, p = 5/4
              g = 1, g' = 5/4, d = 1 + (1/2 - 5/4)/2 = 5/8, y = 11/16
    client 2: g = -3/2, g' = -2, d = -3/2 + (-1/2 + 2)/2 = -3/4, y = 13/8, p = 5/4
              g = -3/4, g' = -3/2, d = -3/4 + (-3/4 + 3/2)/2 = -3/8, y = 29/16
    x = 5/4; d = 1/8; p_1 = 1, p_2 = 13/8
    """
    result = run(stem(0.5, 0.5), HAND, *everyone(2, 1, 2))
    public = result.servers[0].public
    assert [float(public.x.flat), float(public.direction.flat)] == [5 / 4, 1 / 8]
    assert [float(client.point.flat) for client in result.clients[0]] == [1, 13 / 8]


BAD = [
    (padamfed, {"lr": 0.0}, "lr > 0 must hold, got lr=0.0"),
    (padamfed, {"beta": 1.5}, "0 < beta <= 1 must hold, got beta=1.5"),
    (padamfed, {"gamma": 1.0, "server_lr": 1.0}, "give gamma or server_lr, got gamma=1.0, server_lr=1.0"),
    (padamfed, {"start": "warm"}, "start must be zeros or gradient, got 'warm'"),
    (padamfed_vr, {"momentum": "mean"}, "momentum must be direction_mean or plain, got 'mean'"),
    (padamfed_vr, {"eps": 0.0}, "eps > 0 must hold, got eps=0.0"),
    (stem, {"lr": -1.0}, "lr > 0 must hold, got lr=-1.0"),
    (stem, {"a": 1.5}, "0 <= a <= 1 must hold, got a=1.5"),
    (stem, {"schedule": "cosine"}, "schedule must be constant or stem, got 'cosine'"),
    (stem, {"previous": "mean"}, "previous must be own or server, got 'mean'"),
    (stem, {"schedule": "stem", "w": 0.0}, "w > 0 must hold, got w=0.0"),
    (stem, {"first_lr": 0.0}, "first_lr > 0 must hold, got first_lr=0.0"),
    (fafed, {"alpha": -0.5}, "0 <= alpha <= 1 must hold, got alpha=-0.5"),
    (fafed, {"beta": 1.5}, "0 <= beta <= 1 must hold, got beta=1.5"),
    (fafed, {"rho": 0.0}, "rho > 0 must hold, got rho=0.0"),
    (fafed, {"first": "none"}, "first must be plain or preconditioned, got 'none'"),
    (fafed, {"previous": "mean"}, "previous must be own or server, got 'mean'"),
]


@pytest.mark.parametrize(("method", "settings", "message"), BAD)
def test_bad_settings_are_refused(method, settings, message):
    with pytest.raises(ValueError, match=r"must|give") as refused:
        method(**settings)
    assert message in str(refused.value)

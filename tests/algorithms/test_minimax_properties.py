"""Min-max methods, compared with each other and with formulas. ROUNDING_SADDLE: see `identities`."""

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pytest
import torch

from fedfleet.algorithms.contract import Round, RunContext
from fedfleet.algorithms.fed_nsgda_m import fed_nsgda_m
from fedfleet.algorithms.fed_sgda_clip import fed_sgda_clip
from fedfleet.algorithms.fed_sgda_m import fed_sgda_m
from fedfleet.algorithms.fedmuon_da import fedmuon_da
from fedfleet.algorithms.fedmuon_ma import FedMuonMA
from fedfleet.algorithms.fess_gda import Smoothed, fess_gda
from fedfleet.algorithms.local import Rule
from fedfleet.algorithms.local_sgda import local_sgda
from fedfleet.algorithms.local_sgdam import local_sgdam
from fedfleet.algorithms.parts.controlled_momentum import ControlledMomentum
from fedfleet.algorithms.parts.groups import PerGroup
from fedfleet.algorithms.parts.muon import NewtonSchulz, Spectral, Svd
from fedfleet.algorithms.parts.rules import Normalised, Sgd
from fedfleet.algorithms.sagda import sagda
from tests.algorithms.driver import run, tree
from tests.algorithms.identities import ROUNDING_SADDLE
from tests.algorithms.paths import Compare
from tests.algorithms.problems import Quadratic, everyone
from tests.algorithms.saddles import Descent, Saddle

LR, GAMMA = PerGroup(0.02, 0.1), PerGroup(0.05, 0.2)
ALL = everyone(5, 6, 3)
CONTEXT = RunContext(5, 5, 6, 3)


NOISY, EXACT = Descent(), Descent(noise=0.0)
SAME = Compare(NOISY, ROUNDING_SADDLE)
close, equal, unlike = SAME.close, SAME.equal, SAME.unlike


# --- groups -----------------------------------------------------------------------------------------------------------
MADE = {
    "local_sgda": lambda lr: local_sgda(lr, lr),
    "local_sgdam": lambda lr: local_sgdam(lr, lr),
    "fed_sgda_m": lambda lr: fed_sgda_m(lr, lr),
    "sagda": lambda lr: sagda(lr, lr),
    "fess_gda": lambda lr: fess_gda(lr, lr).build(CONTEXT),
    "fed_nsgda_m": lambda lr: fed_nsgda_m(lr, lr, lr),
    "fedmuon_da": lambda lr: fedmuon_da(lr, lr, lr),
    "fed_sgda_clip": lambda lr: fed_sgda_clip(lr, lr, lr),
}
"""The methods, with all settings that may be one number for each group."""


@pytest.mark.parametrize("method", MADE)
def test_without_a_dual_group_the_duals_number_has_no_effect(method):
    equal(MADE[method](PerGroup(0.1, 0.7)), MADE[method](0.1), Quadratic())


@pytest.mark.parametrize("method", MADE)
def test_two_equal_numbers_are_one(method):
    equal(MADE[method](PerGroup(0.1, 0.1)), MADE[method](0.1))
    unlike(MADE[method](PerGroup(0.1, 0.2)), MADE[method](0.1))


@pytest.mark.parametrize("problem", [Quadratic(), NOISY], ids=["one group", "two"])
def test_local_sgdam_is_averaged_momentum_in_both_groups(problem):
    equal(local_sgdam(0.1, 0.4), FedMuonMA(Sgd(0.1), 0.4), problem)


def test_norms_are_of_a_group():
    """The rule Normalised moves each group by the group's step size; with over = "tensor", it moves each tensor by
    that."""
    y, v = (tree(Saddle(seed=seed).start) for seed in (0, 1))
    moved = Normalised(LR).step(y, v, ())[0] - y
    primal = torch.cat([leaf.reshape(-1) for name, leaf in moved.items() if name.startswith("primal.")])
    dual = torch.cat([leaf.reshape(-1) for name, leaf in moved.items() if name.startswith("dual.")])
    assert float(primal.norm()) == pytest.approx(0.02, rel=1e-12)
    assert float(dual.norm()) == pytest.approx(0.1, rel=1e-12)
    for name, leaf in (Normalised(LR, over="tensor").step(y, v, ())[0] - y).items():
        assert float(leaf.norm()) == pytest.approx(0.02 if name.startswith("primal.") else 0.1, rel=1e-12)


# --- methods with a frozen momentum -----------------------------------------------------------------------------------
@dataclass(frozen=True)
class Recording(Rule):
    """A wrapped rule that records the directions that it gets."""

    rule: Rule
    seen: list = field(default_factory=list)

    def step(self, y, v, state):
        self.seen.append(v.flat)
        return self.rule.step(y, v, state)


RULES = {
    "fed_nsgda_m": lambda: fed_nsgda_m(LR, GAMMA, 0.3).rule,
    "fedmuon_da": lambda: fedmuon_da(LR, GAMMA, 0.3, Svd()).rule,
    "fed_sgda_clip": lambda: fed_sgda_clip(LR, GAMMA, 0.3).rule,
}


@pytest.mark.parametrize("method", RULES)
def test_t2_the_mean_of_all_directions_is_the_next_momentum(method):
    """With all clients: the mean of u_k over clients and steps is u_t, and the control variates sum to zero."""
    rule = Recording(RULES[method]())
    result = run(ControlledMomentum(rule, 0.3, 2.0), NOISY, *ALL)
    for r, (server, clients) in enumerate(zip(result.servers, result.clients, strict=True)):
        mean = torch.stack(rule.seen[15 * r : 15 * (r + 1)]).mean(0)
        torch.testing.assert_close(mean, server.private.u.flat, rtol=ROUNDING_SADDLE, atol=ROUNDING_SADDLE)
        own = torch.stack([client.flat for client in clients]).mean(0)
        torch.testing.assert_close(own, server.private.h.flat, rtol=ROUNDING_SADDLE, atol=ROUNDING_SADDLE)


def lengths(method, problem, timetable):
    """The lengths (primal, dual) of the server's step in every round."""
    models = [tree(problem.start), *run(method, problem, *timetable).models()]
    for before, after in pairwise(models):
        moved = after - before
        yield tuple(
            sum(float(leaf.norm() ** 2) for n, leaf in moved.items() if n.startswith(group)) ** 0.5
            for group in ("primal.", "dual.")
        )


def test_t3_a_round_moves_by_gamma_at_most():
    for primal, dual in lengths(fed_nsgda_m(LR, GAMMA, 0.3), NOISY, ALL):
        assert primal <= 0.05 * (1 + ROUNDING_SADDLE)
        assert dual <= 0.2 * (1 + ROUNDING_SADDLE)
    for primal, dual in lengths(fed_nsgda_m(LR, GAMMA, 0.3), Descent(clients=1), everyone(1, 6, 1)):
        assert (primal, dual) == (pytest.approx(0.05, rel=1e-9), pytest.approx(0.2, rel=1e-9))


def test_t3_with_muon_by_the_root_of_the_ranks():
    """Primal: a 3 x 4 matrix, a vector, a number, 3 + 1 + 1; dual: 2 x 3 and a number, 2 + 1."""
    for primal, dual in lengths(fedmuon_da(LR, GAMMA, 0.3, Svd()), NOISY, ALL):
        assert primal <= 0.05 * 5**0.5 * (1 + ROUNDING_SADDLE)
        assert dual <= 0.2 * 3**0.5 * (1 + ROUNDING_SADDLE)


@pytest.mark.parametrize("method", [fed_nsgda_m, fedmuon_da], ids=lambda method: method.__name__)
def test_t4_the_gradients_size_has_no_effect(method):
    """Gradients are multiplied by 1024, which causes no rounding; Newton-Schulz iterations begin by dividing by the
    norm."""
    made = method(LR, GAMMA, 0.3)
    one, other = (torch.stack([m.flat for m in run(made, p, *ALL).models()]) for p in (NOISY, Descent(factor=1024.0)))
    torch.testing.assert_close(one, other, rtol=ROUNDING_SADDLE, atol=ROUNDING_SADDLE)


def test_t5_muons_step_of_a_number_is_the_sign_of_its_gradient():
    numbers = Descent(clients=1, noise=0.0, shapes=(("primal.x", (1, 1)), ("dual.y", ())))
    models = run(fedmuon_da(LR, beta=1.0, ball=Svd()), numbers, *everyone(1, 5, 1)).models()
    z = numbers.start
    for model in models:
        g = numbers.gradient(0, z, 0, 0)
        z = {n: z[n] - (0.02 if n == "primal.x" else 0.1) * np.sign(g[n]) for n in z}
        np.testing.assert_allclose(model.flat, np.concatenate([np.ravel(v) for v in z.values()]), rtol=1e-12)


# --- the others -------------------------------------------------------------------------------------------------------


def test_t10_with_a_zero_the_estimate_is_the_gradient():
    """With one client and exact gradients, the differences of gradients form a telescoping sum."""
    one = Descent(clients=1, noise=0.0)
    result = run(fed_sgda_m(LR, 0.0, "gradient"), one, *everyone(1, 6, 3))
    for server in result.servers:
        at = {name: leaf.numpy() for name, leaf in server.public.x.items()}
        torch.testing.assert_close(
            server.public.m.flat, tree(one.gradient(0, at, 0, 0)).flat, rtol=ROUNDING_SADDLE, atol=ROUNDING_SADDLE
        )


CONTROLLED = {
    "sagda": sagda(LR, 0.8),
    "fed_nsgda_m": fed_nsgda_m(LR, GAMMA, 0.3),
    "fedmuon_da": fedmuon_da(LR, GAMMA, 0.3),
    "fed_sgda_clip": fed_sgda_clip(LR, GAMMA, 0.3),
}


@pytest.mark.parametrize("method", CONTROLLED)
def test_t11_equal_clients_are_one(method):
    """The corrections cancel between clients with the same data and draws."""
    made = CONTROLLED[method]
    together = torch.stack([m.flat for m in run(made, Descent(clients=3, alike=True), *everyone(3, 6, 2)).models()])
    alone = torch.stack([m.flat for m in run(made, Descent(clients=1, alike=True), *everyone(1, 6, 2)).models()])
    # A polar factor by Newton-Schulz amplifies rounding by up to 5e2 a step.
    torch.testing.assert_close(together, alone, rtol=1e-9, atol=1e-9)


def test_t12_sagdas_controls_from_the_displacement():
    """v_i+ = v_i - v - delta_i / (K lr) in both groups, since the sign is in the workload. With a cohort of one client,
    delta can be read off the server's model."""
    cohorts = [[i] for i in (0, 3, 1, 0, 4, 3, 0)]
    steps = {(r, i): 1 + (r + i) % 4 for r in range(7) for i in range(5)}
    result = run(sagda(LR), NOISY, cohorts, steps)
    for r in range(1, 7):
        i, before, after = cohorts[r][0], result.servers[r - 1].public, result.servers[r].public
        recovered = result.clients[r - 1][i].own - before.shared - (after.x - before.x) / (steps[r, i] * LR)
        torch.testing.assert_close(result.clients[r][i].own.flat, recovered.flat, rtol=1e-10, atol=1e-10)
        own = torch.stack([client.own.flat for client in result.clients[r]]).mean(0)
        torch.testing.assert_close(own, after.shared.flat, rtol=ROUNDING_SADDLE, atol=ROUNDING_SADDLE)


def test_t13_the_smoothing_contracts():
    """Without gradients, x - z is multiplied by (1 - beta)(1 - pull) in every round in the primal; the dual does not
    move."""
    x, z = (tree(Saddle(seed=seed).start) for seed in (0, 1))
    rule = Smoothed(1.0, pull=0.3, beta=0.4)
    new, centre = rule.step(x, x.zeros(), x.norm2(), z, Round(1, 1, 1, 1))
    for name, leaf in (new - centre).items():
        factor = 0.6 * 0.7 if name.startswith("primal.") else 0.6
        torch.testing.assert_close(leaf, factor * (x - z)[name], rtol=1e-12, atol=1e-12)
    assert torch.equal(new["dual.Y"], x["dual.Y"])
    made = fess_gda(PerGroup(0.02, 9.0), PerGroup(0.5, 9.0), rho=3.0).build(CONTEXT)
    assert made.server.pull == pytest.approx(0.02 * 0.5 * 3 * 3.0)


def test_fess_gda_needs_the_number_of_steps():
    with pytest.raises(ValueError, match=r"rho > 0 needs federation\.local\.steps"):
        fess_gda().build(RunContext(5, 5, 6, None))


@pytest.mark.parametrize(
    ("ball", "low", "high"), [(Svd(), 1 - 1e-12, 1 + 1e-12), (NewtonSchulz(5, "jordan"), 0.5, 1.5)]
)
def test_t15_polar_factors(ball, low, high):
    """The singular values of a step; an orthogonal matrix is its own polar factor, up to the scheme's accuracy."""
    spectral = Spectral(1.0, Normalised(1.0, over="tensor"), ball, "none")
    y, v = tree(Saddle().start), tree(Saddle(seed=1).start)
    for name in ("primal.W", "dual.Y"):
        values = torch.linalg.svdvals((y - spectral.step(y, v, ())[0])[name])
        assert low <= values.min()
        assert values.max() <= high
    q = tree({"W": np.linalg.qr(np.random.default_rng(0).normal(size=(4, 4)))[0]})
    step = q.zeros() - spectral.step(q.zeros(), q, ())[0]
    values = torch.linalg.svdvals(step["W"])
    assert low <= values.min() <= values.max() <= high
    torch.testing.assert_close(step["W"] / values.mean(), q["W"], rtol=0, atol=1e-10)


# --- by hand ----------------------------------------------------------------------------------------------------------
class Hand:
    """f_1 = x^2/2 + x y - y^2/2, f_2 = (x - 2)^2 - (y - 1)^2/2, from (1, 0); the sign of the dual's gradients is
    reversed."""

    clients, start = 2, {"primal.x": np.array(1.0), "dual.y": np.array(0.0)}

    def gradient(self, i, z, r, k):
        x, y = z["primal.x"], z["dual.y"]
        return {"primal.x": x + y, "dual.y": y - x} if i == 0 else {"primal.x": 2 * (x - 2), "dual.y": y - 1}


def test_fed_nsgda_m_by_hand():
    """Steps of 1/2, beta = 1/2, two local steps, the plain mean; all numbers are dyadic, equality is exact.

    round 1, c = 0: the steps are -1/2 sign(g)
      client 1: g = (1, -1), z = (1/2, 1/2); g = (1, 0), z = (0, 1/2)            h_1 = (1, -1/2)
      client 2: g = (-2, -1), z = (3/2, 1/2); g = (-1, -1/2), z = (2, 1)         h_2 = (-3/2, -3/4)
      z = (1, 3/4), h = (-1/4, -5/8), u = h/2, c = h/2 + u/2 = (-3/16, -15/32)
    round 2, u_k = (g - h_i)/2 + c
      client 1: g = (7/4, -1/4), u_k = (3/16, -11/32); g = (7/4, 3/4), u_k = (3/16, 5/32), z = (0, 3/4)
      client 2: g = (-2, -1/4), u_k = (-7/16, -7/32); g = (-1, 1/4), u_k = (1/16, 1/32), z = (1, 3/4)
      z = (1/2, 3/4), h = (1/8, 1/8), u = h/2 + u/2 = (0, -3/32)
    """
    result = run(fed_nsgda_m(0.5, beta=0.5), Hand(), *everyone(2, 2, 2))
    assert [model.flat.tolist() for model in result.models()] == [[1, 3 / 4], [1 / 2, 3 / 4]]
    assert [server.private.h.flat.tolist() for server in result.servers] == [[-1 / 4, -5 / 8], [1 / 8, 1 / 8]]
    assert result.servers[1].private.u.flat.tolist() == [0, -3 / 32]
    assert [client.flat.tolist() for client in result.clients[0]] == [[1, -1 / 2], [-3 / 2, -3 / 4]]


@pytest.mark.parametrize("method", [fed_nsgda_m, fedmuon_da], ids=lambda method: method.__name__)
def test_sizes_by_theorems_need_enough_rounds_and_a_condition_number(method):
    deferred = method(parameter_free=True)
    with pytest.raises(ValueError, match=r"needs federation\.local\.steps"):
        deferred.build(RunContext(2, 4, 10, None))
    with pytest.raises(ValueError, match="cohort=5, steps=3, rounds=14; raise rounds"):
        deferred.build(RunContext(5, 5, 14, 3))
    assert deferred.build(RunContext(5, 5, 15, 3)).beta == 1.0
    with pytest.raises(ValueError, match=r"condition >= 1 must hold, got condition=0.5"):
        method(parameter_free=True, condition=0.5)

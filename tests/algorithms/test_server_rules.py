"""The rules of servers, compared with each other and with formulas, from their papers and from their differences.

Most of them concern the server's rule alone, which gets given displacements. ROUNDING: float64, a few dozen roundings;
1e-12.
"""

from typing import NamedTuple

import numpy as np
import pytest
import torch

from fedfleet.algorithms.contract import Round
from fedfleet.algorithms.fedadagrad import Adagrad
from fedfleet.algorithms.fedadam import AdamServer, fedadam
from fedfleet.algorithms.fedavgm import ServerMomentum
from fedfleet.algorithms.feddu_adagrad import DoublyAdaptiveAdagrad, feddu_adagrad
from fedfleet.algorithms.feddu_adam import DoublyAdaptiveAdam, feddu_adam
from fedfleet.algorithms.fedexp import Extrapolated, fedexp
from fedfleet.algorithms.fedexp_m import ExtrapolatedMomentum
from fedfleet.algorithms.fedyogi import Yogi
from fedfleet.algorithms.parts.adapted import LastTwo
from fedfleet.algorithms.parts.rules import Adam, Momentum, Sgd
from fedfleet.algorithms.parts.servers import Mean
from fedfleet.algorithms.tree import Tree
from tests.algorithms.driver import run
from tests.algorithms.problems import Quadratic, partial

ROUNDING = 1e-12
RANDOM = torch.Generator().manual_seed(5)
DELTAS = torch.randn(6, 4, 8, generator=RANDOM, dtype=torch.float64)
"""(rounds, clients, P)."""


def alike(a, b, tolerance=ROUNDING):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def vector(flat):
    return Tree.of({"w": flat[:6].reshape(2, 3), "b": flat[6:]})


class Path(NamedTuple):
    x: list  # after each round, flat
    states: list


def serve(rule, deltas=DELTAS):
    """The models of a server's rule from x = 0. deltas: the displacements of every round."""
    x = vector(torch.zeros_like(deltas[0, 0]))
    path, state = Path([], []), rule.init(x)
    for number, moved in enumerate(deltas, 1):
        mean, norm2 = vector(moved.mean(0)), (moved**2).sum(1).mean()
        x, state = rule.step(x, mean, norm2, state, Round(number, len(deltas), len(moved), len(moved)))
        path.x.append(x.flat)
        path.states.append(state)
    return path


def same_path(first, second, tolerance=ROUNDING, deltas=DELTAS):
    for a, b in zip(serve(first, deltas).x, serve(second, deltas).x, strict=True):
        alike(a, b, tolerance)


# --- FedAvgM ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nesterov", [False, True])
def test_server_momentum_is_torchs(nesterov):
    w = torch.zeros(8, dtype=torch.float64, requires_grad=True)
    sgd = torch.optim.SGD([w], lr=0.7, momentum=0.9, nesterov=nesterov)
    for moved, x in zip(DELTAS, serve(ServerMomentum(0.7, 0.9, nesterov)).x, strict=True):
        w.grad = -moved.mean(0)
        sgd.step()
        alike(x, w.detach())


# --- FedOpt -----------------------------------------------------------------------------------------------------------
def test_without_memory_adam_is_signs():
    for v_init in (0.0, 1.0):
        path = serve(AdamServer(0.3, (0.0, 0.0), 0.0, v_init))
        signs = torch.cumsum(0.3 * DELTAS.mean(1).sign(), 0)
        alike(torch.stack(path.x), signs)


def test_first_adagrad_round_from_zero_is_signs():
    alike(serve(Adagrad(0.3, (0.0, 0.0), 0.0, 0.0)).x[0], 0.3 * DELTAS[0].mean(0).sign())


LARGE = 1e9
"""tau, beside which the square root of v has a relative size of 1e-9."""


@pytest.mark.parametrize("kind", [AdamServer, Yogi])
def test_large_tau_from_zero_is_server_momentum(kind):
    """The step is m / tau, where m interpolates: it is FedAvgM with (1 - beta1) / tau times its step size."""
    same_path(kind(LARGE, (0.9, 0.99), LARGE, 0.0), ServerMomentum(0.1, 0.9), 1e-8)


@pytest.mark.parametrize("kind", [Adagrad, Yogi])
def test_large_tau_from_its_square_is_half_of_that(kind):
    same_path(kind(LARGE, (0.9, 0.99), LARGE), ServerMomentum(0.05, 0.9), 1e-8)


def test_large_tau_from_its_square_in_adam():
    """The steps are m / (tau (1 + beta2^(t/2))), t = 1, 2, ..."""
    m, x = torch.zeros(8, dtype=torch.float64), torch.zeros(8, dtype=torch.float64)
    for t, (moved, got) in enumerate(zip(DELTAS, serve(AdamServer(LARGE, (0.9, 0.8), LARGE)).x, strict=True), 1):
        m = 0.9 * m + 0.1 * moved.mean(0)
        x = x + m / (1 + 0.8 ** (t / 2))
        alike(got, x, 1e-8)


def test_adagrads_v_never_falls_and_yogis_moves_by_what_it_says():
    for before, after in zip(serve(Adagrad()).states, serve(Adagrad()).states[1:], strict=False):
        assert (after.v.flat >= before.v.flat).all()
    states, b2 = serve(Yogi(betas=(0.9, 0.7))).states, 0.7
    for r in range(1, len(states)):
        change, square = states[r].v.flat - states[r - 1].v.flat, DELTAS[r].mean(0) ** 2
        alike(change.abs(), (1 - b2) * square)
        assert (states[r].v.flat >= 0).all()


def test_yogi_keeps_v_where_it_is_the_square():
    rule = Yogi(v_init=4.0)
    x = vector(torch.zeros(8, dtype=torch.float64))
    _, state = rule.step(x, vector(torch.full((8,), -2.0, dtype=torch.float64)), torch.tensor(0.0), rule.init(x), ROUND)
    assert (state.v.flat == 4.0).all()


ROUND = Round(1, 6, 4, 4)


def test_yogi_is_adam_in_the_first_round_from_zero():
    first, second = (serve(kind(0.1, v_init=0.0), DELTAS[:1]) for kind in (Yogi, AdamServer))
    alike(first.states[0].v.flat, second.states[0].v.flat)
    alike(first.x[0], second.x[0])


RULES = {
    "adagrad": Adagrad(v_init=0.0, tau=0.0),
    "adam": AdamServer(v_init=0.0, tau=0.0),
    "yogi": Yogi(),
    "fedexp": Extrapolated(0.0),
    "fedexp_m": ExtrapolatedMomentum(0.0),
    "feddu_adagrad": DoublyAdaptiveAdagrad(0.0, 0.0),
    "feddu_adam": DoublyAdaptiveAdam(0.0, 0.0),
}


@pytest.mark.parametrize("rule", RULES)
def test_what_does_not_move_on_the_clients_does_not_move(rule):
    still = DELTAS.clone()
    still[..., 3] = 0.0
    assert all(x[3] == 0.0 and x.isfinite().all() for x in serve(RULES[rule], still).x)
    assert not torch.stack(serve(RULES[rule], torch.zeros_like(DELTAS)).x).any()


def test_bias_correction_undoes_the_start_at_zero():
    """If all displacements are equal, the corrected moments are delta and delta^2 in every round."""
    equals = DELTAS[:1].expand(6, -1, -1)
    steps = torch.stack(serve(AdamServer(0.1, (0.8, 0.9), 1e-12, 0.0, True), equals).x).diff(dim=0)
    alike(steps, (0.1 * equals[1:].mean(1).sign()), 1e-9)


def test_scale_of_all_displacements():
    """FedOpt's step does not depend on the scale of the displacements; the steps of FedExP and FedDuA are proportional
    to it (with epsilon 0)."""
    for name, rule in RULES.items():
        one, other = serve(rule), serve(rule, 100.0 * DELTAS)
        factor = 1.0 if name in ("adagrad", "adam") else 100.0
        if name != "yogi":
            alike(factor * torch.stack(one.x), torch.stack(other.x), 1e-9)


# --- FedExP, FedDuA ---------------------------------------------------------------------------------------------------
def test_fedexp_of_equal_clients_and_of_orthogonal_ones():
    equals = DELTAS[:, :1].expand(-1, 4, -1)
    same_path(Extrapolated(0.0, floor=False), Mean(0.5), deltas=equals)
    same_path(Extrapolated(0.0), Mean(1.0), deltas=equals)
    apart = torch.eye(8, dtype=torch.float64)[:4].expand(6, -1, -1)
    same_path(Extrapolated(0.0), Mean(2.0), deltas=apart)


class Unit(DoublyAdaptiveAdagrad):
    """FedDuA with G = 1."""

    def metric(self, s):
        return vector(torch.ones_like(s.flat))


class UnitMomentum(DoublyAdaptiveAdam):
    def metric(self, s):
        return vector(torch.ones_like(s.flat))


def test_feddua_with_unit_metric_is_fedexp():
    same_path(Unit(epsilon_g=0.1), Extrapolated(0.1, floor=False))
    same_path(UnitMomentum(epsilon_g=0.1, betas=(0.0, 0.99)), Extrapolated(0.1, floor=False))
    same_path(UnitMomentum(betas=(0.8, 0.99)), ExtrapolatedMomentum(0.0, 0.8))


def test_feddua_does_not_know_the_scale_of_s():
    class Scaled(DoublyAdaptiveAdam):
        def metric(self, s):
            return super().metric(s * 7.0)

    same_path(DoublyAdaptiveAdam(0.0), Scaled(0.0))


def test_first_feddu_adagrad_round():
    mean = DELTAS[0].mean(0)
    step = (DELTAS[0] ** 2).sum(1).mean() / 2 * mean.sign() / mean.abs().sum()
    alike(serve(DoublyAdaptiveAdagrad(0.0)).x[0], step)


def test_feddua_moves_by_m_in_its_metric():
    """eta sum v^2 / G = m, which means <v, step> = m."""
    path = serve(DoublyAdaptiveAdam())
    for before, after, state in zip(path.x, path.x[1:], path.states[1:], strict=False):
        alike(state.v.flat @ (after - before), state.m)


@pytest.mark.parametrize(
    "rule", [Extrapolated(0.0, floor=False), DoublyAdaptiveAdagrad(0.0)], ids=["fedexp", "feddu_adagrad"]
)
def test_projections_on_systems_with_a_common_solution_come_nearer(rule):
    """Clients project on {A_i x = b_i}, and z lies in all of these sets: every round reduces |x - z|, for FedDuAdagrad
    in the norm of its G."""
    a = torch.randn(4, 2, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    z = torch.arange(8.0, dtype=torch.float64)
    x = vector(torch.zeros_like(z))
    state = rule.init(x)
    for _ in range(40):
        inverse = torch.linalg.pinv(a)
        moved = (inverse @ (a @ (z - x.flat).unsqueeze(-1))).squeeze(-1)
        before = x.flat - z
        x, state = rule.step(x, vector(moved.mean(0)), (moved**2).sum(1).mean(), state, ROUND)
        g = rule.metric(state).flat if isinstance(rule, DoublyAdaptiveAdagrad) else torch.ones_like(z)
        assert (g * (x.flat - z) ** 2).sum() < (g * before**2).sum()


# --- what is evaluated, what is sent ----------------------------------------------------------------------------------
@pytest.mark.parametrize("method", [fedexp, feddu_adagrad, feddu_adam, fedadam])
def test_the_mean_of_the_last_two_iterates_is_evaluated(method):
    problem = Quadratic()
    shown = run(method(evaluate="last_two"), problem, *partial())
    plain = run(method(evaluate="last"), problem, *partial())
    start = torch.from_numpy(np.concatenate([np.ravel(value) for value in problem.start.values()]))
    models = [start, *(model.flat for model in plain.models())]
    for before, after, model, server in zip(models, models[1:], shown.models(), shown.servers, strict=False):
        alike(model.flat, (before + after) / 2)
        assert torch.equal(server.public.x.flat, after)


@pytest.mark.parametrize(
    ("rule", "uses_norm2"), [(Mean(), False), (Adagrad(), False), *((RULES[n], True) for n in list(RULES)[3:])]
)
def test_only_where_norms_are_used_they_are_sent(rule, uses_norm2):
    assert rule.uses_norm2 == LastTwo(rule).uses_norm2 == uses_norm2


@pytest.mark.parametrize("rule", [Sgd(0.1), Momentum(0.05), Adam(0.03)], ids=lambda rule: type(rule).__name__)
@pytest.mark.parametrize("method", [feddu_adam, fedadam])
def test_scaffolds_c_is_the_mean_of_all_c_i_whatever_the_server_does(method, rule):
    result = run(method(rule, local="scaffold"), Quadratic(), *partial(rounds=10))
    for server, clients in zip(result.servers, result.clients, strict=True):
        alike(server.public.shared.flat, torch.stack([client.own.flat for client in clients]).mean(0))

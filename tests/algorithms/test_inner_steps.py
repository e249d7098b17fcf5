"""Methods that differ from others in their local steps: BiClip, DiLoCo, MuLoCo, FedMuon with averaged momenta,
SCAFFOLD's option I. Exact if both sides do the same operations, else within ROUNDING, see `identities`."""

import dataclasses
import math

import pytest
import torch

from fedfleet.algorithms.avg_biclip import avg_biclip
from fedfleet.algorithms.contract import RunContext
from fedfleet.algorithms.diloco import diloco
from fedfleet.algorithms.fedavg import fedavg
from fedfleet.algorithms.fedmuon_ma import ParameterFree, fedmuon_ma, local_steps
from fedfleet.algorithms.local_muon import local_muon
from fedfleet.algorithms.muloco import muloco
from fedfleet.algorithms.parts.biclip import BiClip, biclip
from fedfleet.algorithms.parts.muon import UNNAMED, Identity, NewtonSchulz, muon
from fedfleet.algorithms.parts.muon_adamw import HiddenMatrices, muon_adamw
from fedfleet.algorithms.parts.rules import Adam, Averaged, Momentum, Sgd, adamw
from fedfleet.algorithms.scaffold import scaffold
from fedfleet.algorithms.table import METHODS
from fedfleet.algorithms.tree import Tree
from fedfleet.engine.config.registry import Registry
from fedfleet.engine.errors import ConfigError
from tests.algorithms.driver import run, tree
from tests.algorithms.problems import Quadratic, everyone, partial
from tests.algorithms.test_identities import ROUNDING, Twins, close, equal, paths

MODES = pytest.mark.parametrize("mode", ["coordinate", "norm"])
Z = Tree.of({"w": torch.tensor([[0.0, -0.3, 2.0], [1e-9, -7.0, 0.5]], dtype=torch.float64)})


# --- BiClip -----------------------------------------------------------------------------------------------------------
@MODES
@pytest.mark.parametrize(("d", "u"), [(0.0, 1.0), (0.2, 1.0), (0.5, 0.5), (0.0, math.inf), (9.0, 20.0)])
def test_biclip_is_idempotent_and_odd(d, u, mode):
    """A norm of six numbers has 8 roundings of 1.1e-16, which the root halves, and the factor has two more: 7e-16. In
    `few`, those of two norms add up."""
    few = 2e-15
    once = biclip(Z, d, u, mode)
    torch.testing.assert_close(biclip(once, d, u, mode).flat, once.flat, rtol=few, atol=0)
    assert torch.equal(biclip(-Z, d, u, mode).flat, -once.flat)
    assert torch.equal(biclip(Z.zeros(), d, u, mode).flat, Z.zeros().flat)
    size = once.flat[Z.flat != 0].abs() if mode == "coordinate" else once.norm()
    assert ((size >= d * (1 - few)) & (size <= u * (1 + few))).all()


def test_equal_thresholds_are_signs_or_directions():
    assert torch.equal(biclip(Z, 0.3, 0.3, "coordinate").flat, 0.3 * Z.flat.sign())
    torch.testing.assert_close(biclip(Z, 0.3, 0.3, "norm").flat, 0.3 * Z.flat / Z.flat.norm())


@MODES
def test_open_thresholds_change_nothing(mode):
    torch.testing.assert_close(biclip(Z, 0.0, math.inf, mode).flat, Z.flat, rtol=1e-15, atol=0)


def test_coordinates_move_by_k_lr_u_at_most():
    cohorts, steps = [[0]] * 4, {(r, i): 3 for r in range(4) for i in range(5)}
    first, second = paths(
        avg_biclip(BiClip(0.1, 0.0, 0.05)), avg_biclip(BiClip(0.1, 0.05, 0.05)), timetable=(cohorts, steps)
    )
    for path in (first, second):
        assert (path.diff(dim=0).abs() <= 3 * 0.1 * 0.05 + 1e-15).all()


# --- DiLoCo, MuLoCo ---------------------------------------------------------------------------------------------------
INNER = adamw(0.03, (0.9, 0.95))


@pytest.mark.parametrize("rule", [INNER, muon_adamw(aux=())], ids=["adamw", "muon"])
def test_one_worker_without_an_outer_optimiser_runs_the_inner_one(rule):
    """The result does not depend on how the steps are divided into rounds."""
    problem = Quadratic(clients=1, noise=0.0)
    ends = [run(diloco(rule, 1.0, 0.0), problem, *everyone(1, 12 // k, k)).models()[-1].flat for k in (1, 3, 12)]
    state, y = rule.init(tree(problem.start)), tree(problem.start)
    for _ in range(12):
        y, state = rule.step(y, tree(problem.gradient(0, {n: v.numpy() for n, v in y.items()}, 0, 0)), state)
    for end in ends:
        torch.testing.assert_close(end, y.flat, rtol=1e-10, atol=1e-10)


def test_one_worker_without_outer_momentum_is_lookahead():
    """Lookahead: the slow weights go a part of the way to the fast weights, which then start again from the slow
    ones."""
    problem, inner, slow_lr = Quadratic(clients=1, noise=0.0), Momentum(0.05), 0.5
    slow = tree(problem.start)
    state = inner.init(slow)
    path = run(diloco(inner, slow_lr, 0.0), problem, *everyone(1, 5, 4)).models()
    for model in path:
        fast = slow
        for _ in range(4):
            g = tree(problem.gradient(0, {n: v.numpy() for n, v in fast.items()}, 0, 0))
            fast, state = inner.step(fast, g, state)
        slow = slow + slow_lr * (fast - slow)
        torch.testing.assert_close(model.flat, slow.flat, rtol=ROUNDING, atol=ROUNDING)


def test_outer_nesterov_in_its_other_form():
    """u <- mu u + lr D; x <- x - (mu u + lr D), a momentum in units of steps, is the same for a constant lr."""
    problem, mu, lr = Quadratic(clients=1, noise=0.0), 0.8, 0.7
    x = tree(problem.start)
    u = x.zeros()
    for model in run(diloco(Sgd(0.1), lr, mu), problem, *everyone(1, 6, 1)).models():
        d = 0.1 * tree(problem.gradient(0, {n: v.numpy() for n, v in x.items()}, 0, 0))
        u = mu * u + lr * d
        x = x - (mu * u + lr * d)
        torch.testing.assert_close(model.flat, x.flat, rtol=ROUNDING, atol=ROUNDING)


def test_a_tiny_outer_step_does_not_move():
    first, _ = paths(diloco(outer_lr=1e-300), diloco(outer_lr=1e-300))
    assert torch.equal(first, tree(Quadratic().start).flat.expand_as(first))


def test_muloco_with_adamw_inside_is_diloco():
    equal(muloco(HiddenMatrices(INNER, INNER), 0.7, 0.9), diloco(INNER, 0.7, 0.9))
    equal(muloco(HiddenMatrices(INNER, INNER, ("W", "U")), 0.7, 0.9), diloco(INNER, 0.7, 0.9))


BALL = NewtonSchulz(scheme="you")


def test_muloco_without_an_outer_optimiser_is_local_muon():
    """With interpolated momentum without Nesterov, plain steps along averaged momenta on vectors, and the mean over the
    cohort."""
    rest = Averaged(Sgd(0.1), 0.75, nesterov=False)
    inner = muon_adamw(0.02, 0.75, ball=BALL, weight_decay=0.0, rest=rest, aux=())
    close(muloco(inner, 1.0, 0.0), local_muon(0.02, 0.1, alpha=0.25, ball=BALL, scale="spectral", over="cohort"))


def test_muloco_of_one_worker_is_muon():
    inner = muon_adamw(0.02, 0.75, ball=BALL, weight_decay=0.0, rest=Averaged(Sgd(0.1), 0.75, nesterov=False), aux=())
    plain = fedavg(muon(0.02, 0.1, 0.75, nesterov=False, ball=BALL, scale="spectral"), carry="keep")
    close(muloco(inner, 1.0, 0.0), plain, Quadratic(clients=1), everyone(1, 6, 2))


def test_split_by_names():
    x = tree(Quadratic().start)  # W, V, U, kernel are matrices, b is not
    rule = HiddenMatrices(Momentum(), Adam(), ("ker*", "?"))
    assert rule.names(x.layout) == ([], ["W", "V", "b", "U", "kernel"])
    assert HiddenMatrices(Momentum(), Adam(), ("ker*", "V")).names(x.layout) == (["W", "U"], ["V", "b", "kernel"])
    assert rule.init(x)[0] == ()


# --- FedMuon with averaged momenta ------------------------------------------------------------------------------------
def test_fedmuon_ma_with_beta_one_and_no_ball_is_sgd_one_step_behind():
    """One client without noise: m is the gradient at y, so each step is a plain step; round 1 has one step less."""
    problem = Quadratic(clients=1, noise=0.0)
    path = run(fedmuon_ma(0.1, 0.1, 1.0, ball=Identity()), problem, *everyone(1, 4, 3)).models()
    ahead = run(fedavg(Sgd(0.1)), problem, *everyone(1, 11, 1)).models()
    for r, model in enumerate(path):
        torch.testing.assert_close(model.flat, ahead[3 * r + 1].flat, rtol=ROUNDING, atol=ROUNDING)


def test_fedmuon_ma_of_one_client_does_not_see_rounds():
    problem = Quadratic(clients=1, noise=0.0)
    ends = [run(fedmuon_ma(), problem, *everyone(1, 12 // k, k)).models()[-1].flat for k in (1, 3, 12)]
    for end in ends[1:]:
        torch.testing.assert_close(end, ends[0], rtol=1e-10, atol=1e-10)


def test_fedmuon_ma_of_equal_clients_is_that_of_one():
    many, one = (run(fedmuon_ma(), Twins(clients=n), *everyone(n, 5, 2)).models()[-1].flat for n in (3, 1))
    torch.testing.assert_close(many, one, rtol=ROUNDING, atol=ROUNDING)


def test_parameter_free_step_and_weight():
    """Corollary 5.2: lr = N^(1/4) / T^(3/4), beta = (N / T)^(1/2), K = T^(1/4) / N^(3/4)."""
    deferred = fedmuon_ma(parameter_free=True, start="zeros")
    assert isinstance(deferred, ParameterFree)
    method = deferred.build(RunContext(cohort=16, clients=20, rounds=100, steps=100))
    assert (method.rule.lr, method.beta) == (pytest.approx(2 / 1000), pytest.approx(0.04))
    assert (method.rule.vector_rule, method.start) == (Sgd(method.rule.lr), "zeros")
    assert local_steps(10_000, 1) == 10
    assert local_steps(10_000, 16) == 1
    with pytest.raises(ValueError, match="steps"):
        deferred.build(RunContext(2, 4, 10, None))
    with pytest.raises(ValueError, match="cohort=20, rounds=2, steps=3"):
        deferred.build(RunContext(20, 20, 2, 3))


@pytest.mark.parametrize(
    "given", [{"matrix_lr": 0.01}, {"vector_lr": 0.1}, {"vector_lr": Sgd(0.1)}, {"beta": 0.1}], ids=str
)
def test_parameter_free_refuses_what_it_sets_itself(given):
    """An argument is refused even if its value is the one that is used without parameter_free."""
    with pytest.raises(ValueError, match=rf"{next(iter(given))} has no effect here, got .*parameter_free"):
        fedmuon_ma(parameter_free=True, **given)


def test_the_old_name_of_parameter_free_is_refused():
    with pytest.raises(ValueError, match="problem_free is called parameter_free now"):
        fedmuon_ma(problem_free=True)
    with pytest.raises(ConfigError, match=r"method.problem_free is called parameter_free now, got True; write"):
        Registry().build("METHODS", {"name": "fedmuon_ma", "problem_free": True}, "method")


NAMED = {
    "local_muon": "classic",  # Takezawa et al. name (15/8, -5/4, 3/8)
    "fedmuon_bc": "classic",
    "muloco": "you",  # Therien et al. print five triples
}


def test_methods_whose_papers_name_no_coefficients_share_one_default():
    """A method with Newton-Schulz iterations has the coefficients that its paper names; all methods whose papers name
    none have the same ones."""
    tables, found = Registry(), {}
    for name in METHODS:
        built = tables.build("METHODS", name, "method")
        schemes = {part.scheme for part in parts_of(built) if isinstance(part, NewtonSchulz)}
        if schemes:
            (found[name],) = schemes
    assert {"fedmuon_ma", "fedmuon_da", *NAMED} == set(found)
    assert found == {**dict.fromkeys(found, UNNAMED.scheme), **NAMED}


def parts_of(part):
    """A part and all parts in it."""
    yield part
    for inner in vars(part).values() if dataclasses.is_dataclass(part) else ():
        yield from parts_of(inner)


# --- SCAFFOLD's option I ----------------------------------------------------------------------------------------------


def test_option_one_keeps_the_gradient_at_the_servers_model():
    problem = Quadratic(noise=0.0)
    cohorts, steps = partial()
    result = run(scaffold(control="server"), problem, cohorts, steps)
    before = problem.start
    for r, cohort in enumerate(cohorts):
        for i in cohort:
            expected = tree(problem.gradient(i, before, r, 0))
            torch.testing.assert_close(result.clients[r][i].own.flat, expected.flat, rtol=ROUNDING, atol=ROUNDING)
        c = torch.stack([client.own.flat for client in result.clients[r]]).mean(0)
        torch.testing.assert_close(result.servers[r].public.shared.flat, c, rtol=ROUNDING, atol=ROUNDING)
        before = {name: value.numpy() for name, value in result.models()[r].items()}


def test_option_one_reaches_the_optimum_of_different_clients():
    problem = Quadratic(noise=0.0, small=True)
    end = run(scaffold(Sgd(0.05), control="server"), problem, *everyone(5, 600, 3)).models()[-1].flat
    torch.testing.assert_close(end, torch.from_numpy(problem.optimum), rtol=1e-9, atol=1e-9)

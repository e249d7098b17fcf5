"""Whole trajectories equal the slow reference: partial participation, unequal local steps, noisy gradients.

TOLERANCE: float64 rounds at 1e-16; the longest path here (6 rounds of up to 4 steps) adds about 1e3 roundings of values
near 1, and one Newton-Schulz step of `jordan` or one SVD of an ill-conditioned matrix may amplify them by up to 5e2
each: 1e-9 is above that and far below the effect of any change of a formula.
"""

import numpy as np
import pytest

from fedfleet.algorithms.fedavg import fedavg
from fedfleet.algorithms.fedmuon_bc import fedmuon_bc
from fedfleet.algorithms.local_muon import local_muon
from fedfleet.algorithms.parts.muon import NewtonSchulz, Svd, muon
from fedfleet.algorithms.parts.rules import Adam, Clip, Momentum, Normalised, Sgd, adamw
from fedfleet.algorithms.scaffold import scaffold
from tests.algorithms.driver import arrays, run
from tests.algorithms.problems import Logistic, Quadratic, partial
from tests.reference import methods as reference
from tests.reference import rules

TOLERANCE = 1e-9
COHORTS, STEPS = partial()
PROBLEMS = {"quadratic": Quadratic(), "logistic": Logistic()}


@pytest.fixture(params=PROBLEMS)
def problem(request):
    return PROBLEMS[request.param]


def slow(method, problem, rule, **settings):
    return method(problem.gradient, problem.start, problem.clients, COHORTS, STEPS, rule, **settings)


def same(tree, expected):
    for name, value in arrays(tree).items():
        np.testing.assert_allclose(value, expected[name], rtol=TOLERANCE, atol=TOLERANCE, err_msg=name)


def agree(fast, expected):
    """Compare x of every round, and c and every client's own tree if the reference has them."""
    for model, x in zip(fast.models(), expected.x, strict=True):
        same(model, x)
    assert not np.allclose(expected.x[0]["W"], expected.x[-1]["W"], atol=1e-4), "nothing moved"
    if expected.c:
        for server, c in zip(fast.servers, expected.c, strict=True):
            same(server.public.shared, c)
    if expected.own:
        for clients, own in zip(fast.clients, expected.own, strict=True):
            for client, tree in zip(clients, own, strict=True):
                same(client.own, tree)


def pair(mu, nesterov, scheme, scale, weight_decay):
    """(the rule Muon, the reference's Muon); vectors take plain steps of 0.1 along the same momentum."""
    fast = muon(0.02, 0.1, mu, nesterov, NewtonSchulz(5, scheme), scale, weight_decay)
    vectors = rules.EmaMomentum(0.1, mu, nesterov)
    return fast, rules.Muon(0.02, mu, vectors, nesterov, weight_decay, scheme=scheme, iterations=5, scaling=scale)


RULES = {
    "sgd": (Sgd(0.1), rules.Sgd(0.1)),
    "momentum": (Momentum(0.05, 0.9), rules.Momentum(0.05, 0.9)),
    "nesterov": (Momentum(0.05, 0.8, nesterov=True), rules.Momentum(0.05, 0.8, nesterov=True)),
    "adam": (Adam(0.03), rules.Adam(0.03)),
    "adam betas": (Adam(0.03, (0.7, 0.8), 1e-3), rules.Adam(0.03, 0.7, 0.8, 1e-3)),
    "adamw": (adamw(0.03, weight_decay=0.1), rules.Adam(0.03, weight_decay=0.1)),
    "muon": pair(0.95, True, "jordan", "jordan", 0.1),
    "muon heavy ball": pair(0.9, False, "polar_express", "spectral", 0.0),
    "normalised": (Normalised(0.05), rules.Normalised(0.05)),
    "clip": (Clip(Sgd(0.1), 2.0), rules.Clip(0.1, 2.0)),
}


STATELESS = ("sgd", "normalised", "clip")
"""Rules without a state, for which only carry = "reset" is allowed."""


@pytest.mark.parametrize(
    ("rule", "carry"),
    [
        (rule, carry)
        for rule in RULES
        for carry in ("reset", "keep", "average")
        if carry == "reset" or rule not in STATELESS
    ],
)
def test_fedavg(problem, rule, carry):
    fast, plain = RULES[rule]
    agree(run(fedavg(fast, carry=carry), problem, COHORTS, STEPS), slow(reference.fedavg, problem, plain, carry=carry))


@pytest.mark.parametrize("over", ["cohort", "all"])
def test_fedavg_server_step(problem, over):
    fast = run(fedavg(Sgd(0.1), server_lr=0.7, over=over), problem, COHORTS, STEPS)
    agree(fast, slow(reference.fedavg, problem, rules.Sgd(0.1), server_lr=0.7, over=over))


@pytest.mark.parametrize("start", ["zeros", "gradient"])
@pytest.mark.parametrize("control", ["mean", "last"])
@pytest.mark.parametrize("rule", ["sgd", "momentum", "adam"])
def test_scaffold(problem, rule, control, start):
    fast, plain = RULES[rule]
    settings = {"control": control, "start": start}
    agree(
        run(scaffold(fast, **settings), problem, COHORTS, STEPS), slow(reference.scaffold, problem, plain, **settings)
    )


@pytest.mark.parametrize("control", ["normalised", "literal"])
@pytest.mark.parametrize("rule", ["sgd", "momentum", "nesterov"])
def test_scaffold_by_displacements(problem, rule, control):
    fast, plain = RULES[rule]
    expected = slow(reference.scaffold, problem, plain, control=control)
    agree(run(scaffold(fast, control=control), problem, COHORTS, STEPS), expected)


@pytest.mark.parametrize("rule", ["momentum", "adam"])
def test_scaffold_with_a_kept_rule(problem, rule):
    fast, plain = RULES[rule]
    expected = slow(reference.scaffold, problem, plain, carry="keep")
    agree(run(scaffold(fast, carry="keep"), problem, COHORTS, STEPS), expected)


@pytest.mark.parametrize("over", ["cohort", "all"])
def test_scaffold_server_step(problem, over):
    fast = run(scaffold(Sgd(0.1), server_lr=0.7, over=over), problem, COHORTS, STEPS)
    agree(fast, slow(reference.scaffold, problem, rules.Sgd(0.1), server_lr=0.7, over=over))


def ball(matrices, vectors, scheme, iterations, scale):
    """(settings of the spectral norm, the reference's rule)."""
    exact = Svd() if scheme == "svd" else NewtonSchulz(iterations, scheme)
    fast = {"matrix_lr": matrices, "vector_lr": vectors, "norm": "spectral", "ball": exact, "scale": scale}
    norms = {"scheme": scheme, "iterations": iterations, "scaling": scale}
    return fast, rules.Lmo("spectral", matrices, vectors, **norms)


NORMS = {
    "svd": ball(0.05, 0.1, "svd", 0, "moonlight"),
    "classic": ball(0.05, 0.2, "classic", 5, "moonlight"),
    "jordan": ball(0.05, 0.2, "jordan", 5, "jordan"),
    "no iteration": ball(0.05, 0.1, "classic", 0, "none"),
    "euclidean": ({"matrix_lr": 0.05, "norm": "euclidean"}, rules.Lmo("euclidean", 0.05)),
    "max": ({"matrix_lr": 0.02, "norm": "max"}, rules.Lmo("max", 0.02)),
}


@pytest.mark.parametrize("over", ["cohort", "all"])
@pytest.mark.parametrize("start", ["zeros", "gradient"])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("method", [local_muon, fedmuon_bc], ids=lambda method: method.__name__)
def test_muon_methods(problem, method, norm, start, over):
    settings, plain = NORMS[norm]
    fast = run(method(alpha=0.3, start=start, over=over, **settings), problem, COHORTS, STEPS)
    agree(fast, slow(getattr(reference, method.__name__), problem, plain, alpha=0.3, start=start, over=over))

"""Trajectories of the server-adaptive, heavy-tail and Muon methods equal the slow references. See `test_trajectories`
for the tolerance; all here run with partial participation and unequal local steps."""

import math

import numpy as np
import pytest

from fedfleet.algorithms.adagrad_biclip import adagrad_biclip
from fedfleet.algorithms.adam_biclip import adam_biclip
from fedfleet.algorithms.avg_biclip import avg_biclip
from fedfleet.algorithms.bi2clip import bi2clip
from fedfleet.algorithms.diloco import diloco
from fedfleet.algorithms.fedadagrad import fedadagrad
from fedfleet.algorithms.fedadam import fedadam
from fedfleet.algorithms.fedavgm import fedavgm
from fedfleet.algorithms.feddu_adagrad import feddu_adagrad
from fedfleet.algorithms.feddu_adam import feddu_adam
from fedfleet.algorithms.fedexp import fedexp
from fedfleet.algorithms.fedexp_m import fedexp_m
from fedfleet.algorithms.fedmuon_ma import fedmuon_ma
from fedfleet.algorithms.fedyogi import fedyogi
from fedfleet.algorithms.muloco import muloco
from fedfleet.algorithms.parts.adapted import Work
from fedfleet.algorithms.parts.biclip import BiClip
from fedfleet.algorithms.parts.muon import NewtonSchulz, Svd
from fedfleet.algorithms.parts.muon_adamw import muon_adamw
from fedfleet.algorithms.parts.rules import Adam, Clip, Momentum, Sgd, adamw
from fedfleet.algorithms.rmsprop_biclip import rmsprop_biclip
from fedfleet.algorithms.scaffold import scaffold
from tests.algorithms.driver import run
from tests.algorithms.test_trajectories import COHORTS, PROBLEMS, RULES, STEPS, agree, same, slow
from tests.reference import biclip, muon_family, rules
from tests.reference import server_adaptive as reference


@pytest.fixture(params=PROBLEMS)
def problem(request):
    return PROBLEMS[request.param]


# name -> (method but for rule and local work, its server there, as a function since it keeps state)
SERVERS = {
    "fedavgm": (fedavgm, {"server_lr": 0.7, "beta": 0.6}, lambda: reference.FedAvgM(0.7, 0.6)),
    "fedadagrad": (fedadagrad, {"server_lr": 0.2}, lambda: reference.FedOpt("adagrad", 0.2, 0.0, 0.0, 1e-3)),
    "fedadam": (fedadam, {"server_lr": 0.1}, lambda: reference.FedOpt("adam", 0.1, 0.9, 0.99, 1e-3)),
    "fedyogi": (fedyogi, {"server_lr": 0.1}, lambda: reference.FedOpt("yogi", 0.1, 0.9, 0.99, 1e-3)),
    "fedadagrad from 0": (
        fedadagrad,
        {"server_lr": 0.1, "tau": 1e-9, "v_init": 0.0},
        lambda: reference.FedOpt("adagrad", 0.1, 0.0, 0.0, 1e-9, 0.0),
    ),
    "fedadam corrected": (
        fedadam,
        {"server_lr": 0.1, "betas": (0.8, 0.95), "tau": 1e-2, "v_init": 0.0, "bias_correction": True},
        lambda: reference.FedOpt("adam", 0.1, 0.8, 0.95, 1e-2, 0.0, bias_correction=True),
    ),
    "fedyogi corrected": (
        fedyogi,
        {"server_lr": 0.1, "betas": (0.8, 0.95), "tau": 1e-2, "v_init": 0.3, "bias_correction": True},
        lambda: reference.FedOpt("yogi", 0.1, 0.8, 0.95, 1e-2, 0.3, bias_correction=True),
    ),
    "fedexp": (fedexp, {"epsilon": 1e-3}, lambda: reference.FedExP(1e-3)),
    "fedexp without floor": (fedexp, {"epsilon": 0.1, "floor": False}, lambda: reference.FedExP(0.1, floor=False)),
    "fedexp_m": (fedexp_m, {"epsilon": 1e-2, "beta": 0.8}, lambda: reference.FedExPM(1e-2, 0.8)),
    "feddu_adagrad": (feddu_adagrad, {"epsilon_g": 0.05}, lambda: reference.FedDuAdagrad(1e-9, 0.05)),
    "feddu_adam": (
        feddu_adam,
        {"betas": (0.8, 0.95), "epsilon": 1e-3, "epsilon_g": 0.01},
        lambda: reference.FedDuAdam(0.8, 0.95, 1e-3, 0.01),
    ),
}


def shown_and_states(fast, expected):
    """Check x, the model that is evaluated, and SCAFFOLD's states."""
    for server, model, x, shown in zip(fast.servers, fast.models(), expected.x, expected.shown, strict=True):
        same(server.public.x, x)
        same(model, shown)
    assert not np.allclose(expected.x[0]["W"], expected.x[-1]["W"], atol=1e-4), "nothing moved"
    for server, c in zip(fast.servers, expected.c, strict=False):
        same(server.public.shared, c)
    for clients, own in zip(fast.clients, expected.own, strict=False):
        for client, tree in zip(clients, own, strict=True):
            same(client.own, tree)


def compare(problem, method, settings, plain, server, **local):
    expected = reference.play(problem.gradient, problem.start, problem.clients, COHORTS, STEPS, plain, server, **local)
    shown_and_states(run(method(**settings), problem, COHORTS, STEPS), expected)


@pytest.mark.parametrize("local", ["plain", "scaffold", "prox"])
@pytest.mark.parametrize("name", SERVERS)
def test_servers(problem, name, local: Work):
    """The trajectories agree, also with the evaluation that is not the default."""
    method, settings, server = SERVERS[name]
    last_two = name.startswith(("feddu", "fedexp")) == (local == "plain")
    shown = "last_two" if last_two else "last"
    more = {"rule": Sgd(0.1), "local": local, "evaluate": shown, **({"mu": 0.4} if local == "prox" else {})}
    compare(problem, method, {**settings, **more}, rules.Sgd(0.1), server(), local=local, mu=0.4, last_two=last_two)


@pytest.mark.parametrize("rule", ["momentum", "adam", "muon"])
@pytest.mark.parametrize("name", ["fedadam", "feddu_adam"])
def test_any_rule(problem, name, rule):
    method, settings, server = SERVERS[name]
    fast, plain = RULES[rule]
    compare(problem, method, {**settings, "rule": fast, "evaluate": "last"}, plain, server())


def test_defaults_of_evaluation(problem):
    for name, (method, settings, server) in SERVERS.items():
        last_two = name.startswith(("feddu", "fedexp"))
        compare(problem, method, {**settings, "rule": Sgd(0.1)}, rules.Sgd(0.1), server(), last_two=last_two)


# --- heavy tails ------------------------------------------------------------------------------------------------------
CLIPS = {
    "coordinate": {"d": 0.2, "u": 0.9},
    "norm": {"d": 1.0, "u": 2.5, "mode": "norm"},
    "upper": {"d": 0.0, "u": 0.5, "weight_decay": 0.1},
    "sign": {"d": 0.4, "u": 0.4},
    "open": {"d": 0.0, "u": math.inf, "mode": "norm"},
}
OUTER = {
    "avg": (avg_biclip, {"server_lr": 0.8}, lambda: reference.Mean(0.8)),
    "adagrad": (adagrad_biclip, {}, lambda: reference.FedOpt("adagrad", 0.1, 0.0, 0.0, 1e-3)),
    "rmsprop": (rmsprop_biclip, {"beta2": 0.95}, lambda: reference.FedOpt("adam", 0.01, 0.0, 0.95, 1e-3)),
    "adam": (adam_biclip, {"tau": 0.01}, lambda: reference.FedOpt("adam", 0.01, 0.9, 0.99, 0.01)),
    "bi2clip": (
        bi2clip,
        {"server_lr": 0.9, "server_d": 0.01, "server_u": 0.05},
        lambda: biclip.BiClipServer(0.9, 0.01, 0.05),
    ),
    "bi2clip norm": (
        bi2clip,
        {"server_d": 0.1, "server_u": 0.2, "server_mode": "norm"},
        lambda: biclip.BiClipServer(1.0, 0.1, 0.2, "norm"),
    ),
}


PAIRS = [(outer, clip) for outer in OUTER for clip in CLIPS if (outer, clip) != ("bi2clip", "sign")]
"""One pair is left out: in it signs add up to 0 or to a rounding error, which the outer threshold d raises to the same
magnitude."""


@pytest.mark.parametrize(("outer", "clip"), PAIRS)
def test_biclip(problem, outer, clip):
    method, settings, server = OUTER[outer]
    fast, plain = BiClip(0.1, **CLIPS[clip]), biclip.BiClip(0.1, **CLIPS[clip])
    compare(problem, method, {"rule": fast, **settings}, plain, server())


# --- DiLoCo, MuLoCo, FedMuon with averaged momenta, SCAFFOLD's option I -----------------------------------------------
INNER = {
    "adamw": (adamw(0.03, (0.9, 0.95), weight_decay=0.1), rules.Adam(0.03, 0.9, 0.95, weight_decay=0.1)),
    "clip": (Clip(Momentum(0.05, 0.9), 1e9), rules.Momentum(0.05, 0.9)),
    "sgd": (Sgd(0.1), rules.Sgd(0.1)),
}


@pytest.mark.parametrize("carry", ["keep", "reset"])
@pytest.mark.parametrize("inner", INNER)
def test_diloco(problem, inner, carry):
    fast, plain = INNER[inner]
    expected = slow(muon_family.diloco, problem, plain, outer_lr=0.7, outer_mu=0.6, carry=carry)
    kept = None if inner == "sgd" else carry  # plain steps have no state of which to say what becomes of it
    agree(run(diloco(fast, 0.7, 0.6, kept), problem, COHORTS, STEPS), expected)


class Matrices:
    """The reference's Muon, for a model without vectors."""

    def __init__(self, **settings):
        self.muon = rules.Muon(vectors=rules.Sgd(1.0), **settings)

    def start(self, x):
        return self.muon.start(x)

    def step(self, y, d, state):
        return self.muon.step(y, d, state)


@pytest.mark.parametrize("aux", [(), ("W",), ("ker*", "?")], ids=str)
@pytest.mark.parametrize("nesterov", [False, True])
def test_muloco(problem, aux, nesterov):
    ball = NewtonSchulz(scheme="you")
    fast = muon_adamw(0.02, 0.9, nesterov, ball, weight_decay=0.1, rest=Adam(0.01, (0.9, 0.95)), aux=aux)
    hidden = Matrices(
        lr=0.02,
        mu=0.9,
        nesterov=nesterov,
        weight_decay=0.1,
        scheme="you",
        iterations=5,
        scaling="spectral",
    )
    plain = muon_family.MuonAdamW(hidden, rules.Adam(0.01, 0.9, 0.95), aux)
    expected = slow(muon_family.diloco, problem, plain, outer_lr=0.9, outer_mu=0.8)
    agree(run(muloco(fast), problem, COHORTS, STEPS), expected)


BALLS = {
    "svd": (Svd(), {"scheme": "svd", "iterations": 0}),
    "jordan": (NewtonSchulz(scheme="jordan"), {"scheme": "jordan", "iterations": 5}),
}


@pytest.mark.parametrize("start", ["batch", "gradient", "zeros"])
@pytest.mark.parametrize("ball", BALLS)
def test_fedmuon_ma(problem, ball, start):
    exact, settings = BALLS[ball]
    plain = rules.Lmo("spectral", 0.05, 0.1, scaling="none", **settings)
    fast = run(fedmuon_ma(0.05, 0.1, 0.3, start, exact), problem, COHORTS, STEPS)
    expected = slow(muon_family.fedmuon_ma, problem, plain, beta=0.3, start=start)
    agree(fast, expected._replace(c=[]))
    for server, m in zip(fast.servers, expected.c, strict=True):
        same(server.public.m, m)


@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_fedmuon_ma_decay_and_a_rule_with_a_state_for_vectors(problem, decay):
    """The rule's state must not change in the step that only estimates."""

    class Plain(rules.Muon):
        """Matrices along m itself."""

        def step(self, y, d, state):
            new, after = super().step(y, d, {**state, "m": {n: v for n, v in d.items() if v.ndim >= 2}})
            return new, after

    vectors = rules.Momentum(0.1, 0.5)
    plain = Plain(0.05, 0.5, vectors, False, decay, scheme="svd", iterations=0, scaling="none")
    fast = fedmuon_ma(0.05, Momentum(0.1, 0.5), 0.3, ball=Svd(), weight_decay=decay)
    expected = slow(muon_family.fedmuon_ma, problem, plain, beta=0.3)
    agree(run(fast, problem, COHORTS, STEPS), expected._replace(c=[]))


@pytest.mark.parametrize("rule", ["sgd", "momentum", "adam"])
def test_scaffold_option_one(problem, rule):
    fast, plain = RULES[rule]
    expected = slow(muon_family.option_one, problem, plain, server_lr=0.7)
    agree(run(scaffold(fast, 0.7, control="server"), problem, COHORTS, STEPS), expected)

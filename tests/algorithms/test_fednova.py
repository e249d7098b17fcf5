"""FedNova: the lengths of local paths, its trajectories against the reference, its fixed points, its identities."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from fedfleet.algorithms.fedavg import fedavg
from fedfleet.algorithms.fednova import fednova
from fedfleet.algorithms.parts.rules import Adam, Averaged, Clip, Momentum, Normalised, Sgd
from fedfleet.engine import run as run_experiment
from fedfleet.engine.config.schema import experiment
from fedfleet.engine.errors import ConfigError
from fedfleet.workloads.client_index import ClientIndex
from fedfleet.workloads.workload import Split, Workload
from tests.algorithms.driver import run
from tests.algorithms.test_trajectories import COHORTS, PROBLEMS, STEPS, agree
from tests.reference import fednova as reference
from tests.reference import rules


@pytest.mark.parametrize(
    ("rule", "mu", "settings", "golden"),
    [
        (Sgd(0.1), 0.0, {}, (1, 2, 5, 20)),
        (Momentum(0.1, 0.9), 0.0, {"momentum": 0.9}, (1, 2.9, 13.1441, 120.9419)),
        (Momentum(0.1, 0.9, nesterov=True), 0.0, {"momentum": 0.9, "nesterov": True}, (1.9, 4.61, 16.82969, 128.84771)),
        (Sgd(0.1), 0.5, {"gamma": 0.05}, (1, 1.95, 4.524381, 12.830282)),
    ],
)
def test_lengths_of_local_paths(rule, mu, settings, golden):
    norms = fednova(rule, mu).local_norms(20).norms
    found = [norms[K - 1] for K in (1, 2, 5, 20)]
    assert found == pytest.approx(golden, abs=5e-5)
    assert found == pytest.approx([reference.norm(K, **settings) for K in (1, 2, 5, 20)])


def test_momentum_with_a_proximal_term_is_what_the_rule_does():
    """Here the pull is part of the direction, so momentum accumulates it: u <- .9 u + 1 - .5 z lr, z <- z + u."""
    u = z = 0.0
    for _ in range(5):
        u = 0.9 * u + 1 - 0.05 * z
        z += u
    assert fednova(Momentum(0.1, 0.9), 0.5).local_norms(5).norms[-1] == pytest.approx(z)


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize(
    ("fast", "plain", "mu", "settings"),
    [
        (Sgd(0.1), rules.Sgd(0.1), 0.0, {}),
        (Sgd(0.1), rules.Sgd(0.1), 0.4, {"gamma": 0.04}),
        (Momentum(0.05, 0.9), rules.Momentum(0.05, 0.9), 0.0, {"momentum": 0.9}),
        (
            Momentum(0.05, 0.8, nesterov=True),
            rules.Momentum(0.05, 0.8, nesterov=True),
            0.0,
            {"momentum": 0.8, "nesterov": True},
        ),
    ],
)
def test_trajectories(problem, fast, plain, mu, settings):
    made = PROBLEMS[problem]
    found = run(fednova(fast, mu, 0.7), made, COHORTS, STEPS)
    arguments = (made.gradient, made.start, made.clients, COHORTS, STEPS, plain)
    agree(found, reference.fednova(*arguments, lambda K: reference.norm(K, **settings), mu, 0.7))


@pytest.mark.parametrize(
    ("lr", "plain", "nova"), [(0.1, 0.866901, 0.394424), (0.01, 0.905319, 0.488799), (0.001, None, 0.498875)]
)
def test_the_fixed_points_of_the_reference(lr, plain, nova):
    assert reference.fixed_point(lr, True) == pytest.approx(nova, abs=1e-6)
    if plain is not None:
        assert reference.fixed_point(lr, False) == pytest.approx(plain, abs=1e-6)


# --- in the engine ----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class TwoParabolas(Workload):
    """Client 0 has one row with c = 0, client 1 has `rows` rows with c = 1; an epoch has one step for each row."""

    rows: int = 10

    def split(self, seed, clients):
        c = np.array([0.0] + [1.0] * self.rows)
        return Split({"c": c}, {"c": c}, ClientIndex(np.array([0, 1, 1 + self.rows]), np.arange(1 + self.rows)))

    def init(self, seed):
        return {"x": torch.tensor([0.5], dtype=torch.float64)}

    def losses(self, p, batch):
        return (p["x"] - batch["c"].to(p["x"].dtype)) ** 2 / 2

    def report(self, p, batch):
        return {"loss": self.losses(p, batch)}


def parabolas(method, rounds, rows=10):
    return run_experiment(
        experiment(
            {
                "workload": TwoParabolas(rows),
                "method": method,
                "federation": {"clients": 2, "cohort": 2, "rounds": rounds, "local": {"epochs": 1, "batch": 1}},
                "engine": {"backend": "local", "dtype": "float64", "block": 2, "kernels": "torch"},
                "evaluate": {"every": 0},
                "tracking": {"uri": "none"},
            }
        )
    )


@pytest.mark.parametrize(("method", "x"), [(fedavg(), 0.637830), (fednova(), 0.452057)])
def test_one_round_of_the_engine(method, x):
    assert float(parabolas(method, 1).model["x"]) == pytest.approx(x, abs=1e-6)


@pytest.mark.parametrize(("method", "x"), [(fedavg(), 0.866901), (fednova(), 0.394424)])
def test_fixed_points_of_the_engine(method, x):
    assert float(parabolas(method, 60).model["x"]) == pytest.approx(x, abs=1e-6)


@pytest.mark.parametrize("rule", [Sgd(0.1), Momentum(0.1, 0.9)])
def test_equal_steps_are_fedavg_to_the_bit(rule):
    assert parabolas(fednova(rule), 3, 1).model_sha256 == parabolas(fedavg(rule), 3, 1).model_sha256


def test_steps_instead_of_norms():
    """tau = mean of K_i: another length of the same direction. With plain descent it would be the same."""
    with pytest.raises(ValueError, match="effective has no effect here"):
        fednova(effective="steps")
    momentum = Momentum(0.01, 0.9)
    norm = fednova(momentum).local_norms(10).norms
    moved = [float(parabolas(fednova(momentum, effective=e), 1).model["x"]) - 0.5 for e in ("norm", "steps")]
    assert moved[1] / moved[0] == pytest.approx((1 + 10) / (norm[0] + norm[9]))


# --- refusals ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("rule", [Adam(), Normalised(), Clip(Sgd(0.1)), Averaged(Normalised())])
def test_rules_that_are_not_linear_are_refused(rule):
    message = f"rule must be linear in the gradients, with one step size, got {type(rule).__name__.lower()}"
    with pytest.raises(ValueError, match=re.escape(message)):
        fednova(rule)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"aggregate": "median"},
            "aggregate: does not go with a method that weighs clients by their steps, got median with method=fednova",
        ),
        (
            {"privacy": {"clip": 1.0, "noise": 0}},
            "privacy: does not go with a method that weighs clients by their steps, got method=fednova",
        ),
    ],
)
def test_what_needs_plain_weights_is_refused(keys, message):
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        run_experiment(experiment({"workload": "digits", "method": "fednova", "engine": {"backend": "local"}, **keys}))

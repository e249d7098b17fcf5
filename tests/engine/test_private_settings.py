"""Settings of private runs that do not fit each other are refused in one sentence, before anything starts."""

from __future__ import annotations

import re

import pytest

from fedfleet.engine.config.schema import experiment
from fedfleet.engine.errors import ConfigError
from fedfleet.engine.run_spec import RunSpec
from fedfleet.engine.runs.prepare import prepare

from .setups import STEPS, digits

pytest.importorskip("dp_accounting")

SCAFFOLD = {"name": "scaffold", "rule": {"name": "sgd", "lr": 0.1}}
FINE = {"clip": 0.5, "noise": 1.0, "delta": 1e-2}
BINOMIAL = {"sampler": "binomial"}
TURNS = {"sampler": {"name": "turns", "separation": 3}}
QUANTILE = {"name": "quantile"}
STANDS = {"clients": 1000, "cohort": 90}


def prepared(privacy, federation=None, **others):
    data = digits(others.pop("method", "fedavg"), STEPS).plain() | others
    data["federation"] |= federation or {}
    return prepare(experiment({**data, "privacy": privacy}), "private")


@pytest.mark.parametrize(
    ("privacy", "federation", "message"),
    [
        ({**FINE, "clip": 0.0}, BINOMIAL, "clip > 0 must hold, got clip=0.0; give a bound"),
        ({**FINE, "clip": float("inf")}, BINOMIAL, "an infinite bound goes with noise: 0, got clip=inf"),
        ({**FINE, "clip": "much"}, BINOMIAL, "clip must be a number, a schedule or {name: quantile}, got 'much'"),
        ({**FINE, "clip": {"name": "median"}}, BINOMIAL, "got median; change it"),
        ({**FINE, "noise": -1.0}, BINOMIAL, "noise must be a number from 0, a schedule or auto, got -1.0"),
        (
            {**FINE, "noise": 0.5, "epsilon": 0.1},
            BINOMIAL,
            "epsilon=0.1 allows not one round at noise=0.5, which costs",
        ),
        (
            {**FINE, "mechanism": {"name": "banded", "bands": 2}},
            {},
            "two turns of a client, got {'name': 'banded', 'bands': 2} with federation.sampler=uniform; choose",
        ),
        (
            {**FINE, "mechanism": {"name": "banded", "bands": 4}},
            TURNS,
            "bands <= separation must hold, got bands=4, separation=3; lower bands",
        ),
        ({**FINE, "mechanism": "laplace"}, BINOMIAL, "no mechanism is called laplace"),
        (
            {**FINE, "clip": QUANTILE},
            BINOMIAL,
            "noise < 2 * count_noise must hold, got noise=1, count_noise=0.45; raise count_noise",
        ),
        (
            {**FINE, "shares": {"own": 1}},
            BINOMIAL,
            "shares must name what is sent, got {own}; scaffold sends delta, estimator",
        ),
        ({**FINE, "scales": {"own": 1}}, BINOMIAL, "scales must name what is sent, got {own}; scaffold sends delta"),
        ({**FINE, "scales": {"delta": -1}}, BINOMIAL, "scales > 0 must hold, got delta=-1"),
        ({**FINE, "epsilon": -1.0}, BINOMIAL, "privacy.epsilon must be greater than 0, got -1.0"),
        ({**FINE, "sigma": 1.0}, BINOMIAL, "privacy.sigma is not a key"),
        ({"noise": 1.0}, BINOMIAL, "privacy.clip is missing"),
    ],
)
def test_settings_that_do_not_fit(privacy, federation, message):
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        prepared(privacy, federation, method=SCAFFOLD)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"method": {"name": "fedexp"}}, "fedexp uses the mean of |y_K - x|^2"),
        ({"method": "fedavg_m"}, "fedavg_m sends a number of steps (steps), which would take up the bound"),
        ({"method": "scaffold_m"}, "scaffold_m sends a number of steps (steps), which would take up the bound"),
        (
            {"method": {"name": "fafed", "start": "zeros"}},
            "fafed has no private form: noise makes the averaged",
        ),
        ({"method": "local_adaalter"}, "local_adaalter has no private form: noise makes the averaged"),
        (
            {"method": {"name": "fedavg", "rule": {"name": "adam", "lr": 0.01}, "carry": "average"}},
            "fedavg sends a number of steps (carried)",
        ),
        ({"method": {**SCAFFOLD, "start": "gradient"}}, "start: gradient is a pass over all clients"),
    ],
)
def test_methods_that_do_not_fit(others, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        prepared(FINE, {}, **others)


@pytest.mark.parametrize(
    ("privacy", "federation", "adjacency", "kind"),
    [
        (FINE, BINOMIAL, "add_or_remove", "pld"),
        (FINE, {}, "replace", "rdp"),
        (FINE, {"cohort": 30}, "zero_out", "pld"),
        (FINE, TURNS, "zero_out", "pld"),
        ({**FINE, "mechanism": "tree"}, TURNS, "zero_out", "pld"),
        ({**FINE, "accountant": "rdp"}, BINOMIAL, "add_or_remove", "rdp"),
        ({**FINE, "delta": 1e-4, "as_if": STANDS}, {}, "add_or_remove", "pld"),
    ],
)
def test_adjacency_and_accountant_follow(privacy, federation, adjacency, kind):
    plan = prepared(privacy, federation).privacy
    assert plan is not None
    assert (plan.adjacency, plan.kind) == (adjacency, kind)


def test_releases_of_the_combinations():
    def releases(privacy, federation, t):
        plan = prepared(privacy, federation).privacy
        assert plan is not None
        return tuple(plan.releases(t, 2.0))

    assert releases(FINE, BINOMIAL, 5) == (5, 2.0, 0.3, None)
    assert releases(FINE, {}, 5) == (5, 1.0, None, (9, 30))
    assert releases(FINE, {"cohort": 30}, 5) == (5, 2.0, None, None)
    assert releases(FINE, TURNS, 5) == (2, 2.0, 0.9, None)
    assert releases(FINE, {**TURNS, "cohort": 10}, 5) == (2, 2.0, None, None)
    banded = {**FINE, "mechanism": {"name": "banded", "bands": 3}}
    assert releases(banded, TURNS, 7) == (3, 2.0, 0.9, None)
    times, noise, rate, subset = releases({**FINE, "mechanism": "tree"}, TURNS, 3)
    assert (times, rate, subset) == (1, None, None)
    assert noise == pytest.approx(2 / 2**0.5)
    assert releases({**FINE, "delta": 1e-4, "as_if": STANDS}, {}, 4) == (4, 2.0, 0.09, None)


@pytest.mark.parametrize(
    ("federation", "mechanism", "z"),
    [
        ({"sampler": "binomial"}, "gaussian", 1.610),
        ({}, "gaussian", 6.469),
        ({"sampler": {"name": "turns", "separation": 11}}, "tree", 15.70),
        ({"sampler": {"name": "turns", "separation": 11}}, {"name": "banded", "bands": 11}, 4.570),
    ],
)
def test_golden_noise_for_a_target(federation, mechanism, z):
    """539 clients, 49 in a round, 110 rounds, epsilon = 2 at delta = 0.001: the study privacy/budget."""
    chosen = experiment(
        {
            "workload": "digits",
            "method": "fedavg",
            "federation": {"clients": 539, "cohort": 49, "rounds": 110, **federation},
            "privacy": {"clip": 0.3, "delta": 1e-3, "epsilon": 2, "mechanism": mechanism},
        }
    )
    plan = RunSpec.of("golden", chosen).privacy
    assert plan is not None
    assert plan.multiplier == pytest.approx(z, abs=6e-3)

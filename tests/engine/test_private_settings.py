"""Settings of private runs that do not fit each other are refused in one sentence, before anything starts."""

from __future__ import annotations

import re

import pytest

from fedfleet.engine.config.schema import experiment
from fedfleet.engine.errors import ConfigError
from fedfleet.engine.run_spec import RunSpec
from fedfleet.engine.runs.launch import prepare

from .setups import STEPS, digits

pytest.importorskip("dp_accounting")

SCAFFOLD = {"name": "scaffold", "rule": {"name": "sgd", "lr": 0.1}}
FINE = {"clip": 0.5, "noise": 1.0, "delta": 1e-2}
POISSON = {"sampling": "poisson"}
CYCLIC = {"sampling": "cyclic", "separation": 3}
QUANTILE = {"name": "quantile"}
STANDS = {"clients": 1000, "cohort": 90}


def prepared(privacy, federation=None, **others):
    data = digits(others.pop("method", "fedavg"), STEPS).plain() | others
    data["federation"] |= federation or {}
    return prepare(experiment({**data, "privacy": privacy}), "private")


@pytest.mark.parametrize(
    ("privacy", "federation", "message"),
    [
        ({**FINE, "clip": 0.0}, POISSON, "clip > 0 must hold, got clip=0.0; give a bound"),
        ({**FINE, "clip": float("inf")}, POISSON, "an infinite bound goes with noise: 0, got clip=inf"),
        ({**FINE, "clip": "much"}, POISSON, "clip must be a number, a schedule or {name: quantile}, got 'much'"),
        ({**FINE, "clip": {"name": "median"}}, POISSON, "got median; change it"),
        (
            {**FINE, "delta": 0.1},
            POISSON,
            "privacy.delta: delta <= 1 / clients must hold, got 0.1 with federation.clients=30; lower",
        ),
        (
            {"clip": 0.5, "noise": 1.0},
            POISSON,
            "privacy.delta: noise needs a delta, got none with noise=1.0; give a number",
        ),
        (
            {"clip": 0.5, "delta": 1e-2},
            POISSON,
            "noise: auto needs epsilon, got auto with epsilon=none; give epsilon, or noise",
        ),
        (
            {"clip": 0.5, "noise": 0, "epsilon": 1.0},
            POISSON,
            "epsilon: noise=0 has no epsilon, got 1.0 with noise=0; drop it, or give",
        ),
        ({**FINE, "noise": -1.0}, POISSON, "noise must be a number from 0, a schedule or auto, got -1.0"),
        (
            {**FINE, "noise": 0.5, "epsilon": 0.1},
            POISSON,
            "epsilon=0.1 allows not one round at noise=0.5, which costs",
        ),
        (
            {**FINE, "accountant": "pld"},
            {},
            "accountant: pld has no bound for a fixed cohort of S < N, got pld with federation.sampling=fixed; choose",
        ),
        (
            {**FINE, "mechanism": "tree"},
            POISSON,
            "privacy.mechanism: needs rounds between two turns of a client, got tree with federation.sampling=po",
        ),
        (
            {**FINE, "mechanism": {"name": "banded", "bands": 2}},
            {},
            "two turns of a client, got {'name': 'banded', 'bands': 2} with federation.sampling=fixed; choose",
        ),
        (
            {**FINE, "mechanism": {"name": "banded", "bands": 4}},
            CYCLIC,
            "bands <= separation must hold, got bands=4, separation=3; lower bands",
        ),
        ({**FINE, "mechanism": "laplace"}, POISSON, "no mechanism is called laplace"),
        (
            {**FINE, "clip": QUANTILE, "mechanism": "tree"},
            CYCLIC,
            "quantile goes with mechanism gaussian, got {'name': 'quantile'} with privacy.mechanism=tree",
        ),
        (
            {**FINE, "clip": QUANTILE, "shares": {"delta": 1}},
            POISSON,
            "quantile goes with joint clipping, got {'name': 'quantile'} with shares=",
        ),
        (
            {**FINE, "clip": QUANTILE},
            POISSON,
            "noise < 2 * count_noise must hold, got noise=1, count_noise=0.45; raise count_noise",
        ),
        (
            {**FINE, "mechanism": "tree", "noise": {"schedule": "exponential", "start": 1.0, "decay": 0.9}},
            CYCLIC,
            "privacy.noise: a schedule goes with mechanism gaussian",
        ),
        (
            {**FINE, "as_if": {"clients": 50, "cohort": 5}},
            POISSON,
            "as_if.cohort >= federation.cohort must hold, got 5 with federation.cohort=9",
        ),
        (
            {**FINE, "delta": 1e-4, "as_if": STANDS, "mechanism": "tree"},
            CYCLIC,
            "privacy.as_if: goes with sampling fixed or poisson, got federation.sampling=cyclic; drop it",
        ),
        (
            {**FINE, "as_if": STANDS},
            POISSON,
            "delta <= 1 / clients must hold, got 0.01 with privacy.as_if.clients=1000",
        ),
        ({**FINE, "scales": {"delta": 1}, "shares": {"delta": 1}}, POISSON, "scales and shares exclude each other"),
        (
            {**FINE, "shares": {"own": 1}},
            POISSON,
            "shares must name what is sent, got {own}; scaffold sends delta, estimator",
        ),
        ({**FINE, "scales": {"own": 1}}, POISSON, "scales must name what is sent, got {own}; scaffold sends delta"),
        ({**FINE, "scales": {"delta": -1}}, POISSON, "scales > 0 must hold, got delta=-1"),
        (FINE, {"weights": "examples"}, "examples gives a client's influence no public bound"),
        ({**FINE, "epsilon": -1.0}, POISSON, "privacy.epsilon must be greater than 0, got -1.0"),
        ({**FINE, "sigma": 1.0}, POISSON, "privacy.sigma is not a key"),
        ({"noise": 1.0}, POISSON, "privacy.clip is missing"),
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
        (
            {"method": {"name": "fedavg", "rule": {"name": "adam", "lr": 0.01}, "carry": "average"}},
            "fedavg sends a number of steps (carried)",
        ),
        ({"method": {**SCAFFOLD, "start": "gradient"}}, "start: gradient is a pass over all clients"),
        ({"aggregate": "median"}, "privacy: clipping and noise go with the mean, got aggregate=median; choose"),
    ],
)
def test_methods_that_do_not_fit(others, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        prepared(FINE, {}, **others)


@pytest.mark.parametrize(
    ("privacy", "federation", "adjacency", "kind"),
    [
        (FINE, POISSON, "add_or_remove", "pld"),
        (FINE, {}, "replace", "rdp"),
        (FINE, {"cohort": 30}, "zero_out", "pld"),
        (FINE, CYCLIC, "zero_out", "pld"),
        ({**FINE, "mechanism": "tree"}, CYCLIC, "zero_out", "pld"),
        ({**FINE, "accountant": "rdp"}, POISSON, "add_or_remove", "rdp"),
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

    assert releases(FINE, POISSON, 5) == (5, 2.0, 0.3, None)
    assert releases(FINE, {}, 5) == (5, 1.0, None, (9, 30))
    assert releases(FINE, {"cohort": 30}, 5) == (5, 2.0, None, None)
    assert releases(FINE, CYCLIC, 5) == (2, 2.0, 0.9, None)
    assert releases(FINE, {**CYCLIC, "cohort": 10}, 5) == (2, 2.0, None, None)
    banded = {**FINE, "mechanism": {"name": "banded", "bands": 3}}
    assert releases(banded, CYCLIC, 7) == (3, 2.0, 0.9, None)
    times, noise, rate, subset = releases({**FINE, "mechanism": "tree"}, CYCLIC, 3)
    assert (times, rate, subset) == (1, None, None)
    assert noise == pytest.approx(2 / 2**0.5)
    assert releases({**FINE, "delta": 1e-4, "as_if": STANDS}, {}, 4) == (4, 2.0, 0.09, None)


@pytest.mark.parametrize(
    ("federation", "mechanism", "z"),
    [
        ({"sampling": "poisson"}, "gaussian", 1.610),
        ({}, "gaussian", 6.469),
        ({"sampling": "cyclic", "separation": 11}, "tree", 15.70),
        ({"sampling": "cyclic", "separation": 11}, {"name": "banded", "bands": 11}, 4.570),
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

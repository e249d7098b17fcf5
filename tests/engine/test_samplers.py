"""Samplers: inclusion probabilities against theory, exact re-weighting, and the identities between them.

Counts are compared by statistics that follow a chi-squared distribution, with the limit at its 99.9 % quantile. The
seeds are fixed, so that a test either always passes or never does.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

from fedfleet.engine import run
from fedfleet.engine.cohorts.samplers import Ask, Feedback, capped, race, sample, systematic
from fedfleet.engine.config.registry import Registry
from fedfleet.engine.config.schema import experiment
from fedfleet.engine.errors import ConfigError
from fedfleet.engine.runs.prepare import prepare

from .setups import driver_here, next_round

SIZES = np.array([1] * 9 + [11])
"""Ten clients; the last one has more than half of the examples."""


def build(spec):
    return Registry().build("SAMPLERS", spec, "federation.sampler")


def ask(number, sizes=SIZES, size=2, examples=False, eligible=None, seed=0, **more):
    target = sizes / sizes.sum() if examples else None
    given = {
        "spares": 0,
        "probe": lambda clients, rows: clients.astype(float),
        "duration": lambda: np.ones(len(sizes)),
        "steps": np.full(len(sizes), 5),
        "batch": 10,
        **more,
    }
    return Ask(seed, number, len(sizes), size, eligible=eligible, sizes=sizes, target=target, **given)


def play(sampler, rounds, loss=None, **more):
    """The draws of some rounds. loss: client -> its training loss."""
    state, drawn = sampler.start(len(more.get("sizes", SIZES)), more.get("size", 2)), []
    for number in range(1, rounds + 1):
        one = ask(number, **more)
        draw = sampler.draw(state, one)
        own = np.ones(len(draw.clients)) if loss is None else loss[draw.clients]
        state = sampler.told(state, one, draw, Feedback(draw.clients, own, own))
        drawn.append(draw)
        assert (np.diff(draw.clients) > 0).all()
    return drawn


def counts(draws, clients):
    return np.bincount(np.concatenate([draw.clients for draw in draws]), minlength=clients)


EVEN = np.full(100, 3)


# --- frequencies ------------------------------------------------------------------------------------------------------
def test_uniform_cohorts():
    """(N - 1) / N * sum of (O - R S / N)^2 / (R (S / N) (1 - S / N)) follows chi^2 with N - 1 degrees of freedom."""
    found = counts(play(build("uniform"), 2000, sizes=EVEN, size=10), 100)
    assert 0.99 * ((found - 200) ** 2 / (200 * 0.9)).sum() < 148.23


def test_all_clients_in_the_first_round():
    """Later cohorts are those of the plain sampler, with and without spares, and where some cannot be drawn."""
    everyone, plain = build({"name": "uniform", "first": "all"}), build("uniform")
    for more in ({}, {"eligible": np.arange(1, 9)}):
        drawn, usual = (play(each, 3, spares=3, **more) for each in (everyone, plain))
        assert np.array_equal(drawn[0].clients, more.get("eligible", np.arange(10)))
        assert not len(drawn[0].spares)
        for first, second in zip(drawn[1:], usual[1:], strict=True):
            assert np.array_equal(first.clients, second.clients)
            assert np.array_equal(first.spares, second.spares)
    assert everyone.sizes(0, 1, 10, 2) == {10}
    assert everyone.sizes(0, 5, 10, 2) == {10, 2}
    asked = {
        "workload": "digits",
        "method": "mifa",
        "federation": {"clients": 20, "cohort": 4, "rounds": 3, "sampler": {"name": "uniform", "first": "all"}},
        "engine": {"backend": "local"},
        "tracking": {"uri": "none"},
    }
    fleet = {"devices": {"name": "lognormal", "sigma": 1.0}}
    for more in ({}, {"systems": fleet}, {"aggregate": {"name": "trimmed_mean", "f": 1}}):
        assert [row["client/count"] for row in run(experiment({**asked, **more})).rows] == [20, 4, 4]
    selected = {**asked["federation"], "pace": {"select": 1.5}}
    rows = run(experiment({**asked, "federation": selected, "systems": fleet})).rows
    assert [(row["client/count"], row["client/selected"]) for row in rows] == [(20, 20), (4, 6), (4, 6)]


def test_poisson_cohorts():
    """sum of (O - R q)^2 / (R q (1 - q)) follows chi^2 with N degrees of freedom."""
    draws = play(build("poisson"), 2000, sizes=EVEN[:50], size=5)
    assert ((counts(draws, 50) - 200) ** 2 / 180).sum() < 86.66
    everyone = play(build("poisson"), 3, sizes=EVEN, size=100)
    assert all(len(draw.clients) == 100 for draw in everyone)


def test_draws_with_replacement():
    """The multiplicities follow chi^2 with N - 1 degrees of freedom around R S q_i."""
    sizes = np.arange(1, 51)
    draws = play(build({"name": "replacement", "by": "examples"}), 2000, sizes=sizes, size=10)
    times = np.zeros(50)
    for draw in draws:
        times[draw.clients] += np.rint(draw.weights * (50 * sizes / sizes.sum()))[draw.clients]
    expected = 2000 * 10 * sizes / sizes.sum()
    assert times.sum() == 20_000
    assert ((times - expected) ** 2 / expected).sum() < 85.35


def test_a_race_and_a_systematic_draw_have_their_inclusions():
    """Successive sampling of 2 of 4 with rates .4 .3 .2 .1 includes .7159 .6083 .4413 .2345; the systematic draw has
    exactly its probabilities, and always as many clients."""
    rates, clients = np.array([0.4, 0.3, 0.2, 0.1]), np.arange(4)
    raced = np.bincount(np.concatenate([race(ask(n), "test", clients, rates, 2) for n in range(2000)]), minlength=4)
    error = 4 * 0.5 / 2000**0.5
    assert np.abs(raced / 2000 - [0.7159, 0.6083, 0.4413, 0.2345]).max() < error
    pi = capped(np.array([0.7, 0.1, 0.1, 0.05, 0.05]), 2)
    assert pi == pytest.approx([1, 1 / 3, 1 / 3, 1 / 6, 1 / 6])
    drawn = [systematic(ask(n), "test", np.arange(5), pi) for n in range(2000)]
    assert all(len(one) == 2 for one in drawn)
    assert np.abs(np.bincount(np.concatenate(drawn), minlength=5) / 2000 - pi).max() < error


def test_separated_cohorts():
    """20 clients, 4 a round, never within 3 rounds: counts closer to R S / N than those of uniform cohorts."""
    draws = play(build({"name": "separated", "rounds": 3}), 3000, sizes=EVEN[:20], size=4)
    last = np.full(20, -3)
    for number, draw in enumerate(draws):
        assert (number - last[draw.clients] >= 3).all()
        last[draw.clients] = number
    spread = counts(draws, 20).std()
    assert 5 < spread < 14  # 9.4 in theory, 21.9 of uniform cohorts
    for draw in play(build({"name": "separated", "rounds": 3, "stateless": True}), 30, sizes=EVEN[:20], size=4):
        assert len(draw.clients) <= 4


@pytest.mark.parametrize(("order", "sizes"), [("id", [3] * 8), ("shuffled", [3] * 8), ("reshuffled", [3, 3, 3, 1] * 2)])
def test_cyclic_cohorts(order, sizes):
    draws = play(build({"name": "cyclic", "order": order}), 8, sizes=EVEN[:10], size=3)
    assert [len(draw.clients) for draw in draws] == sizes
    if order == "id":
        assert [draw.clients.tolist() for draw in draws[:5]] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [0, 1, 9], [2, 3, 4]]
    everyone = counts(draws, 10)
    assert everyone.max() - everyone.min() <= 1
    few = build({"name": "cyclic", "order": order})
    for draw in play(few, 6, sizes=EVEN[:10], size=3, eligible=np.array([1, 4, 5, 7])):
        assert set(draw.clients) <= {1, 4, 5, 7}


# --- re-weighting -----------------------------------------------------------------------------------------------------
def mean_of_means(spec, rounds, mean="auto", size=2):
    """The mean over many draws of the mean of Delta_i = 0, …, 0, 1 with the target p_i = n_i / n, and its standard
    error."""
    found = []
    for number, draw in enumerate(play(build(spec), rounds, size=size, examples=True), 1):
        one = ask(number, size=size, examples=True)
        if mean == "unbiased" and draw.weights is None:
            weights, divisor = len(SIZES) * one.shares(), float(size)
        elif draw.weights is None:
            weights, divisor = SIZES.astype(float), None
        else:
            weights, divisor = draw.weights, draw.divisor
        used = draw.clients
        total = weights[used].sum() if divisor is None else divisor
        found.append(weights[used][used == 9].sum() / total if len(used) else 0.0)
    return np.mean(found), np.std(found) / rounds**0.5


@pytest.mark.parametrize(
    ("spec", "mean"),
    [
        ("uniform", "unbiased"),
        ("replacement", "auto"),
        ({"name": "replacement", "by": "examples"}, "auto"),
        ("poisson", "auto"),
        ("weighted", "auto"),
        ({"name": "cyclic", "order": "reshuffled"}, "unbiased"),
        ({"name": "separated", "rounds": 2}, "unbiased"),
    ],
)
def test_re_weighting_is_unbiased(spec, mean):
    """The target is 11 / 20. With nine clients of one example and one of eleven the mean that is normalised over the
    cohort has the expectation .1833 instead."""
    found, error = mean_of_means(spec, 1000, mean)
    assert abs(found - 0.55) <= 4 * error + 1e-12


@pytest.mark.parametrize("spec", ["replacement", {"name": "replacement", "by": "examples"}, "weighted"])
@pytest.mark.parametrize("examples", [False, True])
def test_the_mean_is_one_over_the_clients_that_can_be_drawn(spec, examples):
    """Half of the clients are online, each with the displacement 1: the step is 1 in every round, or on average."""
    sampler, online, steps = build(spec), np.arange(5, 10), []
    for number in range(1, 1001):
        draw = sampler.draw({}, ask(number, examples=examples, eligible=online))
        steps.append(draw.weights[draw.clients].sum() / draw.divisor)
    assert abs(np.mean(steps) - 1) <= 4 * np.std(steps) / 1000**0.5 + 1e-12


def test_the_unbiased_mean_is_one_over_the_clients_that_are_online():
    """If all of them take part, it is their mean by examples, with weights that sum to 1."""
    workload = {"name": "digits", "model": "logistic", "partition": {"name": "dirichlet", "beta": 0.3}}
    more = {"systems": {"availability": {"name": "bernoulli", "p": 0.5}}, "workload": workload}
    plan = {"cohort": 20, "weights": "examples"}
    plain, unbiased = (run(digits(plan={**plan, "mean": mean}, **more)) for mean in ("normalised", "unbiased"))
    for name, tensor in plain.model.items():
        torch.testing.assert_close(unbiased.model[name], tensor, rtol=1e-5, atol=1e-7)  # roundings of the weights


@pytest.mark.parametrize("weights", ["uniform", "examples"])
@pytest.mark.parametrize("name", ["poisson", "replacement", "weighted"])
def test_a_mean_over_all_clients_does_not_depend_on_what_a_cohort_is_divided_by(name, weights):
    """over: all is the sum of w_i Delta_i over N: the mean over the cohort, normalised, times the sum of w_i over N. In
    float64, three rounds of sums of six displacements below 1 differ by less than 100 units of rounding."""
    workload = {"name": "digits", "model": "logistic", "partition": {"name": "dirichlet", "beta": 0.3}}
    double = {"engine": {"backend": "local", "dtype": "float64"}, "method": {"name": "fedavg", "over": "all"}}
    plan = {"weights": weights}
    found = [run(digits(name, {**plan, "mean": mean}, workload=workload, **double)) for mean in ("auto", "normalised")]
    for leaf, tensor in found[0].model.items():
        torch.testing.assert_close(found[1].model[leaf], tensor, rtol=0, atol=100 * 2**-53)
    damped, plain = (
        run(digits(name, {**plan, "mean": "normalised"}, workload=workload, **{**double, "method": method}))
        for method in (double["method"], "fedavg")
    )
    assert any(not torch.allclose(damped.model[leaf], tensor) for leaf, tensor in plain.model.items())


def test_normalising_over_the_cohort_is_not():
    found, error = mean_of_means("uniform", 1000)
    assert abs(found - 0.2 * 11 / 12) < 4 * error


# --- feedback ---------------------------------------------------------------------------------------------------------
def test_power_of_choice_takes_the_largest_losses():
    chosen = play(build({"name": "power_of_choice", "d": 10}), 5)
    assert all(draw.clients.tolist() == [8, 9] for draw in chosen)
    last = build({"name": "power_of_choice", "d": 10, "candidates": "uniform", "loss": "last"})
    loss = np.arange(10.0)
    draws = play(last, 12, loss=loss)
    assert sorted(np.concatenate([draw.clients for draw in draws[:5]]).tolist()) == list(range(10))  # new ones first
    assert all(draw.clients.tolist() == [8, 9] for draw in draws[5:])


def test_oort_prefers_losses_and_speed_and_explores():
    durations = np.r_[np.full(50, 1.0), np.full(50, 100.0)]
    loss = np.r_[np.full(25, 5.0), np.full(25, 1.0)] * 1.0
    loss = np.r_[loss, loss]
    draws = play(build("oort"), 100, loss=loss, sizes=EVEN, size=10, duration=lambda: durations)
    found = counts(draws[40:], 100).reshape(4, 25).mean(1)  # fast and large, fast, slow and large, slow
    assert found[0] > found[1]
    assert found[0] > found[2]
    assert counts(draws, 100).min() > 0  # everybody is explored
    only = build({"name": "oort", "explore": 1.0, "explore_decay": 1.0, "explore_least": 1.0})
    first = play(only, 10, sizes=EVEN, size=10)
    assert sorted(np.concatenate([draw.clients for draw in first]).tolist()) == list(range(100))


# --- identities -------------------------------------------------------------------------------------------------------
def test_identities_of_draws():
    for number in range(1, 20):
        one = ask(number, sizes=EVEN, size=10)
        uniform = sample(0, number, 100, 10)
        choice = build({"name": "power_of_choice", "d": 10, "candidates": "uniform"})
        for sampler in (build("uniform"), choice, build({"name": "separated", "rounds": 1})):
            assert np.array_equal(sampler.draw(sampler.start(100, 10), one).clients, uniform)
    asked = ask(1, sizes=EVEN, size=10, examples=True)
    weighted = build("weighted").draw({}, asked)
    assert (weighted.weights == 1).all()
    shares = np.arange(1.0, len(EVEN) + 1) / np.arange(1.0, len(EVEN) + 1).sum()  # as with weights by targets
    other = build("weighted").draw({}, asked._replace(target=shares))
    np.testing.assert_allclose(other.weights, shares / (EVEN / EVEN.sum()), rtol=1e-12)


def digits(sampler: Any = "uniform", plan: Any = None, **more: Any):
    return experiment(
        {
            "workload": {"name": "digits", "model": {"name": "mlp", "hidden": [4]}},
            "method": "fedavg",
            "federation": {
                "clients": 20,
                "cohort": 6,
                "rounds": 3,
                "sampler": sampler,
                "local": {"steps": 2, "batch": 8},
                **(plan or {}),
            },
            "engine": {"backend": "local", "block": 2, "kernels": "torch"},
            "evaluate": {"every": 0},
            "tracking": {"uri": "none"},
            **more,
        }
    )


def test_identities_of_runs():
    plain = run(digits()).model_sha256
    same = [{"name": "power_of_choice", "d": 6, "candidates": "uniform"}, {"name": "separated", "rounds": 1}]
    assert {run(digits(sampler)).model_sha256 for sampler in same} == {plain}
    assert run(digits("replacement")).model_sha256 != plain
    everyone = run(digits(plan={"cohort": 20})).model_sha256
    assert run(digits("poisson", {"cohort": 20})).model_sha256 == everyone


def test_a_skipped_round_leaves_the_server_alone():
    lonely = {"clients": 20, "cohort": 1, "rounds": 8}
    rows = run(digits("poisson", lonely)).rows
    empty = [row for row in rows if row["client/count"] == 0]
    assert empty
    assert all("server/lr" not in row for row in empty)
    step = run(digits({"name": "poisson", "empty": "step"}, lonely))
    assert step.model_sha256 == run(digits("poisson", lonely)).model_sha256  # a zero step of the plain mean


def test_states_are_averaged_by_their_own_weights():
    """Adam's number of steps grows by two in every round that has clients, however many they are."""
    method = {"name": "fedavg", "rule": {"name": "adam", "lr": 0.01}, "carry": "average"}
    made = digits("poisson", {"rounds": 5}, method=method, engine={"backend": "local", "block": 1, "kernels": "torch"})
    with driver_here(made) as driver:
        counts = [next_round(driver)["client/count"] for _ in range(5)]
        assert len(set(counts)) > 1
        assert float(driver.server.public.carried.count) == 2 * sum(count > 0 for count in counts)


# --- refusals ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("sampler", "plan", "message"),
    [
        ("unifrom", {}, "federation.sampler.name: no sampler is called unifrom; did you mean uniform?"),
        ({"name": "separated", "rounds": 4}, {}, "federation.sampler: cohort * rounds <= clients must hold"),
        ({"name": "power_of_choice", "d": 3}, {}, "federation.sampler: cohort <= d <= clients must hold, got cohort=6"),
        ({"name": "weighted", "exact": False}, {}, "exact=false goes with federation.weights: examples, got uniform"),
        (
            "binomial",
            {"mean": "unbiased"},
            "federation.mean: binomial and turns divide by the sum of the weights, got unbiased with sampler=binomial",
        ),
    ],
)
def test_mistakes_are_one_sentence(sampler, plan, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        prepare(digits(sampler, plan), "test")

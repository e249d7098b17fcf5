"""Private runs: their noise follows from the seed, and their epsilon is recorded."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from fedfleet.algorithms.privacy.noise import Draws
from fedfleet.engine import resume, run
from fedfleet.engine.config.schema import experiment
from fedfleet.engine.errors import Diverged, Interrupted
from fedfleet.engine.run_spec import RunSpec
from fedfleet.tune.one_run import text_of
from fedfleet.tune.run_report import write_run_report
from fedfleet.workloads import counted
from tests.faults import runs as faults

from .setups import EPOCHS, METHODS, STEPS, digits

pytest.importorskip("dp_accounting")

BINOMIAL = {"sampler": "binomial"}
TURNS = {"sampler": {"name": "turns", "separation": 3}}
NOISY = {"clip": 0.5, "noise": 1.0, "delta": 1e-2}
QUANTILE = {**NOISY, "clip": {"name": "quantile", "count_noise": 2.0}}


def private(privacy, federation=None, method: Any = "fedavg", rounds=3, local=STEPS, **engine):
    """Run an experiment with 30 clients, about 9 of them in each round; privacy: the section of this name, or None."""
    data = digits(method, local, rounds, **engine).plain()
    data["federation"] |= federation or {}
    return experiment(data if privacy is None else {**data, "privacy": privacy})


def untimed(result, names=None):
    return [
        {
            name: value
            for name, value in row.items()
            if not name.startswith("time/") and (names is None or name in names)
        }
        for row in result.rows
    ]


def column(result, name):
    return [row[name] for row in result.rows]


# ---------------------------------------------------------------- Clipping and noise


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("local", [STEPS, EPOCHS], ids=["steps", "epochs"])
def test_without_noise_and_bound_nothing_changes(method, local):
    plain = run(private(None, method=method, local=local))
    bounded = run(private({"clip": math.inf, "noise": 0}, method=method, local=local))
    assert bounded.model_sha256 == plain.model_sha256
    assert untimed(bounded, set(plain.rows[0])) == untimed(plain, set(plain.rows[0]))
    assert "privacy/epsilon" not in bounded.rows[0]


@pytest.mark.parametrize("clip", [math.inf, {"name": "quantile", "start": 1e6, "below": 0.9}], ids=["one", "adapted"])
def test_clients_of_a_bounded_method_have_views_of_their_own(clip):
    """alpha of FedDyn then depends on the rows of a client."""
    method = {"name": "feddyn", "alpha_by": "examples", "rule": {"name": "sgd", "lr": 0.1}}
    plain, bounded = (run(private(each, method=method)) for each in (None, {"clip": clip, "noise": 0}))
    assert bounded.model_sha256 == plain.model_sha256


def noise_of_first_round(privacy, federation, method="fedavg"):
    """(model after one round with noise minus that without, the run with noise), in float64."""
    noisy = run(private(privacy, federation, method, rounds=1, dtype="float64"))
    still = run(private({**privacy, "noise": 0}, federation, method, rounds=1, dtype="float64"))
    flat = [torch.cat([leaf.reshape(-1) for leaf in result.model.values()]) for result in (noisy, still)]
    return flat[0] - flat[1], noisy


@pytest.mark.parametrize("federation", [BINOMIAL, {}, {"cohort": 30}, TURNS], ids=str)
def test_the_noise_is_what_follows_from_the_seed(federation):
    found, result = noise_of_first_round({**NOISY, "noise": 1.5}, federation)
    cohort = federation.get("cohort", 9)
    (drawn,) = Draws(0, [tuple(found.shape)])("noise", 1)
    expected = 1.5 * 0.5 / cohort * drawn
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert result.rows[0]["privacy/noise"] == pytest.approx(1.5 * 0.5 / cohort)
    assert abs(float(drawn.std()) - 1) < 4 / (2 * len(drawn)) ** 0.5
    key = counted.key(0, "privacy", "noise", 1, 0, 0)
    assert torch.equal(drawn, counted.normal(key, len(drawn)))


def test_a_tree_of_one_round_is_one_draw():
    found, result = noise_of_first_round({**NOISY, "mechanism": "tree"}, TURNS)
    (drawn,) = Draws(0, [tuple(found.shape)])("tree", 0, 0)
    torch.testing.assert_close(found, 0.5 / 9 * drawn, rtol=0, atol=1e-12)
    assert result.rows[0]["privacy/noise"] == pytest.approx(0.5 / 9)


def test_shares_have_noise_of_their_own():
    privacy = {**NOISY, "shares": {"delta": 3, "estimator": 4}}
    found, _ = noise_of_first_round(privacy, BINOMIAL, "scaffold")
    drawn, _ = Draws(0, [tuple(found.shape)] * 2)("noise", 1)
    torch.testing.assert_close(found, 2**0.5 * 0.6 * 0.5 / 9 * drawn, rtol=0, atol=1e-12)


def test_scales_divide_the_noise():
    privacy = {**NOISY, "scales": {"delta": 4.0}}
    found, _ = noise_of_first_round(privacy, BINOMIAL, "scaffold")
    drawn, _ = Draws(0, [tuple(found.shape)] * 2)("noise", 1)
    torch.testing.assert_close(found, 0.5 / 9 / 4 * drawn, rtol=0, atol=1e-12)


def test_as_if_of_the_same_federation_is_the_plain_mechanism():
    plain = run(private(NOISY, BINOMIAL))
    stands = run(private({**NOISY, "as_if": {"clients": 30, "cohort": 9}}, BINOMIAL))
    assert stands.model_sha256 == plain.model_sha256
    assert column(stands, "privacy/epsilon_as_if") == column(plain, "privacy/epsilon")
    assert "privacy/epsilon" not in stands.rows[0]


def test_as_if_has_the_noise_of_a_larger_cohort():
    found, result = noise_of_first_round({**NOISY, "delta": 1e-4, "as_if": {"clients": 3000, "cohort": 90}}, {})
    (drawn,) = Draws(0, [tuple(found.shape)])("noise", 1)
    torch.testing.assert_close(found, 0.5 / 90 * drawn, rtol=0, atol=1e-12)
    assert result.rows[0]["privacy/noise"] == pytest.approx(0.5 / 90)


def test_a_quantile_moves_the_bound():
    still = run(private({**QUANTILE, "noise": 0}, BINOMIAL, rounds=6))
    bounds = np.array(column(still, "privacy/clip"))
    below = np.array(column(still, "privacy/below"))
    np.testing.assert_allclose(bounds[1:], bounds[:-1] * np.exp(-0.2 * (below[:-1] - 0.5)), rtol=1e-6)
    clipped, count = np.array(column(still, "client/clipped")), np.array(column(still, "client/count"))
    np.testing.assert_allclose(below, ((1 - 2 * clipped) * count / 2) / 9 + 0.5, rtol=1e-12)
    assert bounds[0] == pytest.approx(0.1)
    noisy = run(private(QUANTILE, BINOMIAL, rounds=2))
    share = (1 - 2 * noisy.rows[0]["client/clipped"]) * noisy.rows[0]["client/count"] / 2
    drawn = float(counted.normal(counted.key(0, "privacy", "below", 1), 1))
    assert noisy.rows[0]["privacy/below"] == pytest.approx((share + 2 * drawn) / 9 + 0.5)
    assert noisy.rows[0]["privacy/noise"] == pytest.approx((1 - 1 / 16) ** -0.5 * np.float32(0.1) / 9)
    assert column(noisy, "privacy/epsilon") == column(run(private(NOISY, BINOMIAL, rounds=2)), "privacy/epsilon")


def test_schedules_of_bound_and_noise():
    falling = {"schedule": "exponential", "start": 0.8, "decay": 0.5}
    result = run(private({"clip": falling, "noise": {**falling, "start": 2.0}, "delta": 1e-2}, BINOMIAL))
    assert column(result, "privacy/clip") == [0.8, 0.4, 0.2]
    np.testing.assert_allclose(column(result, "privacy/noise"), np.array([1.6, 0.4, 0.1]) / 9)
    spent = column(result, "privacy/epsilon")
    assert spent == sorted(spent)


def test_a_client_whose_message_is_not_a_number_sends_zeros(tmp_path):
    """A message with NaN neither ends the run nor changes the model, and the record counts it."""
    client = int(faults.cohort_of(1)[0])
    broken = faults.setting(tmp_path, rounds=1) | {"privacy": {"clip": 0.5, "noise": 0}}
    faults.plan(tmp_path, faults.rule(client, "nan"))
    result = run(experiment(broken))
    assert result.rows[0]["client/nonfinite"] == 1
    assert all(bool(torch.isfinite(leaf).all()) for leaf in result.model.values())


def test_a_dropped_client_is_a_zero_in_the_sum(tmp_path):
    """The sum is still divided by S, and the noise is the same: the model is that of a run in which it sends zeros."""
    client, models = int(faults.cohort_of(1)[0]), []
    for kind in ("raise", "nan"):
        folder = tmp_path / kind
        broken = faults.setting(folder, rounds=1, on_failure="drop") | {"privacy": NOISY}
        faults.plan(folder, faults.rule(client, kind))
        models.append(run(experiment(broken)))
    dropped, zeros = models
    assert dropped.rows[0]["client/dropped"] == 1
    assert zeros.rows[0]["client/dropped"] == 0
    assert dropped.rows[0]["privacy/epsilon"] == zeros.rows[0]["privacy/epsilon"]
    for name in zeros.model:
        torch.testing.assert_close(dropped.model[name], zeros.model[name], rtol=1e-6, atol=1e-7)


def test_the_result_and_the_report_say_what_was_spent(tmp_path):
    result = run(private(NOISY, BINOMIAL), tmp_path / "run")
    line = text_of(result, 1.0).splitlines()[-1]
    assert line.startswith("privacy: epsilon = ")
    assert "3 rounds, z = 1; PLD" in line
    page = write_run_report(tmp_path / "run").read_text()
    assert "<h2>Privacy</h2>" in page
    assert f"epsilon = {result.rows[-1]['privacy/epsilon']:.4g} at delta = 0.01" in page
    assert "privacy" not in text_of(run(private(None), tmp_path / "public"), 1.0)


# ---------------------------------------------------------------- Transactions


MECHANISMS = {
    "tree": ({**NOISY, "mechanism": "tree"}, TURNS),
    "banded": ({**NOISY, "mechanism": {"name": "banded", "bands": 3}}, TURNS),
    "banded_inverse": ({**NOISY, "mechanism": {"name": "banded_inverse", "bands": 3}}, TURNS),
    "quantile": (QUANTILE, BINOMIAL),
    "calibrated": ({**NOISY, "noise": "auto", "epsilon": 9.0}, {}),
}


@pytest.mark.parametrize("name", MECHANISMS)
def test_a_resumed_run_has_the_same_bits_and_costs(name, tmp_path):
    privacy, federation = MECHANISMS[name]
    chosen = private(privacy, federation, "scaffold", rounds=6)
    whole = run(chosen)
    with pytest.raises(Interrupted):
        run(chosen, tmp_path / "run", [faults.Watch(r3=faults.interrupt)])
    assert "3 rounds" in (tmp_path / "run" / "run.log").read_text()
    again = resume(chosen, tmp_path / "run")
    assert again.model_sha256 == whole.model_sha256
    assert untimed(again) == untimed(whole)


def test_a_task_that_is_repeated_spends_once(tmp_path):
    def chosen(folder):
        return experiment(faults.setting(folder, rounds=3) | {"privacy": {**NOISY, "epsilon": None}})

    expected = run(chosen(tmp_path / "sound"))
    faults.plan(tmp_path / "broken", faults.rule(int(faults.cohort_of(1)[2]), "raise", 1, 1))
    faults.same(run(chosen(tmp_path / "broken")), expected)


@pytest.mark.long
def test_blocks_and_workers_change_nothing(ray_here):
    for privacy, federation in (MECHANISMS["tree"], MECHANISMS["quantile"]):
        chosen = private(privacy, federation, "scaffold")
        expected = run(chosen)
        workers = run(private(privacy, federation, "scaffold", backend="ray", workers=2))
        assert workers.model_sha256 == expected.model_sha256
        assert untimed(workers) == untimed(expected)


def test_rounds_without_clients_are_released_too():
    small = {**BINOMIAL, "clients": 3, "cohort": 1}
    result = run(private({**NOISY, "noise": 0.8}, small, "scaffold", rounds=8))
    counts = column(result, "client/count")
    assert 0 in counts
    assert len(counts) == 8
    assert all(
        b > a
        for a, b in zip([0.0, *column(result, "privacy/epsilon")], column(result, "privacy/epsilon"), strict=False)
    )


# ---------------------------------------------------------------- Targets and budgets


def test_the_noise_is_calibrated_to_a_target():
    for federation in (BINOMIAL, {}, TURNS):
        result = run(private({"clip": 0.5, "epsilon": 4.0, "delta": 1e-2}, federation, rounds=4))
        assert 4 * (1 - 1e-3) <= result.rows[-1]["privacy/epsilon"] <= 4
        spent = column(result, "privacy/epsilon")
        assert spent == sorted(spent)


def test_a_run_ends_when_its_budget_is_spent(tmp_path):
    privacy = {**NOISY, "epsilon": 1.5}
    result = run(private(privacy, BINOMIAL, rounds=50), tmp_path / "run")
    free = run(private(NOISY, BINOMIAL, rounds=len(result.rows) + 1))
    assert len(result.rows) < 50
    assert result.rows[-1]["privacy/epsilon"] <= 1.5 < free.rows[-1]["privacy/epsilon"]
    assert "eval/accuracy" in result.rows[-1]
    log = (tmp_path / "run" / "run.log").read_text()
    assert f"{len(result.rows)} rounds" in log
    assert "no deployable mechanism" in log


def test_a_round_that_diverges_is_spent(tmp_path):
    chosen = private({**NOISY, "clip": 1e9, "noise": 1e6}, BINOMIAL)
    with pytest.raises(Diverged):
        run(chosen, tmp_path / "run")
    assert "1 rounds, z = 1e+06" in (tmp_path / "run" / "run.log").read_text()


def test_a_round_without_clients_may_diverge():
    """Nobody takes part in round 1 of this seed; its noise alone makes the model too large."""
    data = {**private({**NOISY, "clip": 1e9, "noise": 1e6}, {**BINOMIAL, "cohort": 1}).plain(), "seed": 3}
    with pytest.raises(Diverged, match=r"\d; no client took part, the server's step made"):
        run(experiment(data))


def test_the_stage_of_a_private_run_is_what_it_says():
    spec = RunSpec.of("private", private(NOISY, BINOMIAL))
    assert spec.privacy is not None
    assert "one client added or removed; Poisson, q = 0.3, 3 rounds, z = 1; PLD" in spec.privacy.description(3)
    assert spec.last_round == 3
    assert "privacy" not in private(None).plain()

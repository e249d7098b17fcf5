"""Rounds that collect messages where something is unusual: other cohorts, lost workers, little disk or memory."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fedfleet.algorithms.aggregation.contract import in_proportion
from fedfleet.algorithms.aggregation.krum import MultiKrum
from fedfleet.algorithms.aggregation.nnm import Nnm
from fedfleet.engine.aggregation.stage import StageRunner
from fedfleet.engine.api import resume, run
from fedfleet.engine.cohorts.samplers import CountedSampler
from fedfleet.engine.config.schema import experiment
from fedfleet.engine.errors import ConfigError, StoreFull
from fedfleet.engine.run_spec import RunSpec
from tests.aggregation.test_engine import NNM_KRUM, RESISTS, StopsAfter, same, spec, with_checkpoints
from tests.faults.runs import Watch, plan, rule, setting, visitor

BINOMIAL = {"sampler": "binomial"}
TURNS = {"sampler": {"name": "turns", "separation": 2}, "cohort": 8}


@pytest.mark.parametrize(
    "federation", [BINOMIAL, TURNS, {**TURNS, "cohort": 10}], ids=["binomial", "turns", "whole groups"]
)
def test_sizes_of_cohorts_are_known_before(federation: dict[str, Any]):
    run_spec = RunSpec.of("x", spec("mean", **{"rounds": 40, **federation}))
    plan, sampler = run_spec.experiment.federation, run_spec.sampler
    assert isinstance(sampler, CountedSampler)
    drawn = (sampler.cohort(run_spec.experiment.seed, round, plan.clients, plan.cohort) for round in range(1, 41))
    assert run_spec.stage_plan.round_sizes == {len(cohort) for cohort in drawn}


@pytest.mark.parametrize("federation", [BINOMIAL, TURNS], ids=["binomial", "turns"])
@pytest.mark.parametrize("aggregate", [NNM_KRUM, "median"], ids=str)
def test_rounds_of_different_sizes(federation: dict[str, Any], aggregate: Any, tmp_path: Path):
    """They run, resume to the same bits, and f is in proportion to the cohort."""
    made = spec(aggregate, attack={"name": "alie", "share": 0.2}, rounds=5, **federation)
    whole, made = run(made), with_checkpoints(made)
    assert len({row["client/count"] for row in whole.rows}) > 1
    with pytest.raises(KeyboardInterrupt):
        run(made, tmp_path / "run", [StopsAfter(2)])
    assert same(whole, resume(made, tmp_path / "run"))


@pytest.mark.parametrize("name", ["median", "centred_clipping", "norm_clipping", "mean"])
def test_a_round_without_clients_is_a_round(name: str):
    """Cohorts of one client in the mean: the answer to no messages is 0, with and without collecting."""
    attack = {"name": "mimic", "share": 0.2, "warmup": 2}
    rows = run(spec(name, attack=attack, cohort=1, rounds=8, **BINOMIAL)).rows
    empty = [place for place, row in enumerate(rows) if row["client/count"] == 0]
    assert empty
    assert all(rows[place]["client/norm2"] == 0 for place in empty)
    assert all(row["client/norm2"] > 0 for place, row in enumerate(rows) if place not in empty)


def test_f_is_in_proportion_to_the_cohort():
    assert [in_proportion(2, drawn, 10) for drawn in (1, 5, 10, 11, 20)] == [1, 1, 2, 3, 4]
    plan = RunSpec.of("x", spec("median", **BINOMIAL, rounds=30)).stage_plan
    assert plan.largest_cohort == max(plan.round_sizes) > 10


def test_rounds_that_are_too_small_are_refused_before_anything_starts():
    words = r"Bulyan needs S >= 4 f \+ 3, got f=\d in a round of \d+ clients, which federation.sampler: binomial draws"
    with pytest.raises(ConfigError, match=words):
        run(spec({"name": "bulyan", "f": 1}, **BINOMIAL, rounds=30))


def test_sign_flip_of_gradients_climbs_the_loss():
    """With plain descent and one step a client's displacement is turned round; the other clients' are not."""
    attack = {"name": "sign_flip", "of": "gradients", "clients": list(range(20))}
    local = {"local": {"steps": 1, "batch": 8}, "rounds": 1}
    method = {"name": "fedavg", "rule": {"name": "sgd", "lr": 0.1}}
    plain, flipped = (run(spec("mean", method=method, attack=each, **local)) for each in (None, attack))
    start = RunSpec.of("x", spec("mean", method=method, **local)).initial_model()
    for name, view in start.items():
        torch.testing.assert_close(flipped.model[name] - view, view - plain.model[name], rtol=1e-4, atol=1e-7)
    assert flipped.rows[0]["train/loss"] == pytest.approx(plain.rows[0]["train/loss"], rel=1e-5)
    assert flipped.rows[0]["robust/byzantine"] == 10


def test_poisoned_data_have_no_rounds():
    with pytest.raises(ConfigError, match=r"rounds: the data are poisoned for the whole run, got rounds=1-2; drop it"):
        run(spec("mean", attack={"name": "label_flip", "share": 0.1, "rounds": "1-2"}))


@pytest.mark.parametrize("aggregate", [{"name": "krum", "f": 2}, {"name": "trimmed_mean", "f": 2}], ids=str)
def test_a_warm_start_is_aggregated_by_the_rule(aggregate: dict[str, Any]):
    """STEM begins with a gradient from all clients. Four of twenty send infinities in that pass alone, "0-0"; f is in
    proportion there, 4 of 20, and the messages that are not finite are left out."""
    attack = {"name": "infinite", "clients": list(range(4)), "rounds": "0-0"}
    result = run(spec(aggregate, method="stem", attack=attack, rounds=2))
    assert all(bool(torch.isfinite(leaf).all()) for leaf in result.model.values())
    assert not same(result, run(spec("mean", method="stem", rounds=2)))


@pytest.mark.long
def test_a_worker_killed_in_a_round_that_collects(tmp_path: Path, ray_here: Any):
    """By SIGKILL in the middle of a client's steps, with a rule and an attack over the rows: the same bits."""
    data = setting(tmp_path / "none", rounds=4) | RESISTS
    expected = run(experiment(data))
    client, before = visitor(3)
    plan(tmp_path / "kills", rule(client, "kill", before + 1, 1))
    watch = Watch()
    data = setting(tmp_path / "kills", rounds=4, backend="ray", workers=2) | RESISTS
    assert same(run(experiment(data), observers=[watch]), expected)
    assert any("worker died" in text for text in watch.told)


def test_rows_that_do_not_fit_the_disk_are_refused(tmp_path: Path):
    """10 messages of 7,510 numbers and 6 further rows, where no file may have more than 4 KiB, so that their space
    cannot be reserved."""
    made = spec("median", method="fedavg")
    engine = made.engine.model_copy(update={"store": str(tmp_path)})
    made = made.model_copy(update={"engine": engine, "workload": {"name": "digits", "model": MLP}})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(StoreFull) as error:
            run(made)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    width = 4 * (64 * 100 + 100 + 100 * 10 + 10)
    said = str(error.value)
    assert f"the median reads the messages of a round at once, 10 of {width:,} bytes; " in said
    assert f"their files take {16 * width:,} bytes, and " in said
    assert "bytes free" in said
    assert not list(tmp_path.iterdir())


MLP = {"name": "mlp", "hidden": [100]}


def test_messages_that_do_not_fit_the_memory_are_refused():
    runner = StageRunner(RunSpec.of("x", spec(NNM_KRUM)).stage_plan, lambda tasks: [])
    words = r"looks at 10 messages at once, which takes [\d,]+ bytes of memory, and 1,000 bytes are free; lower"
    with pytest.raises(ConfigError, match=words):
        runner.check_memory(1000)
    runner.check_memory(None)
    runner.check_memory(10**9)


GROWTH = """
import resource, sys
from fedfleet.engine.api import run
from tests.aggregation.test_engine import spec
from tests.aggregation.test_rounds import WIDE
peaks = []
for cohort in (8, 64):
    made = spec({"name": "multi_krum", "f": 2, "before": ["nnm"]}, method="fedavg", clients=64, cohort=cohort,
                rounds=2, local={"steps": 1, "batch": 1})
    engine = made.engine.model_copy(update={"block": 1})
    run(made.model_copy(update={"workload": {"name": "digits", "model": WIDE}, "engine": engine}))
    peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
print(peaks[1] - peaks[0])
"""
WIDE = {"name": "mlp", "hidden": [1000, 1000]}


@pytest.mark.long
def test_memory_does_not_grow_with_the_cohort():
    """56 messages more of 4.3 MB each, 240 MB: driver and worker in one process take less than a fifth of that more."""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", GROWTH], cwd=root, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) < 56 * 4.3e6 / 5


@pytest.mark.parametrize("before", [[], [{"name": "bucketing", "s": 2}]], ids=["rows", "buckets"])
def test_what_is_kept_is_in_proportion_to_the_cohort(before: list[Any]):
    """The messages that `keep` leaves out, in proportion to the cohort and rounded up, as f is: so keep = S - f is the
    default in rounds of every size, and an f that stands before the rule is scaled too."""
    chosen = MultiKrum(f=2, keep=8)
    kept: list[Any] = [chosen.scaled(drawn, 10) for drawn in (1, 5, 10, 11, 20)]
    assert [rule.keep for rule in kept] == [1, 4, 8, 8, 16]
    assert [Nnm(f=2).scaled(drawn, 10) for drawn in (5, 20)] == [Nnm(f=1), Nnm(f=4)]
    keep = 10 - 1 if not before else 5 - 1
    given, default = ({"name": "multi_krum", "f": 1, "before": before, **more} for more in ({"keep": keep}, {}))
    results = [run(spec(each, **BINOMIAL, rounds=4)) for each in (given, default)]
    assert len({row["client/count"] for row in results[0].rows}) > 1
    assert same(*results)

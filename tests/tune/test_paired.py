"""Differences on common random numbers: `fedfleet compare --paired` and `fedfleet.compare(…, paired=True)`."""

from __future__ import annotations

import json
import math
import shutil
import statistics
from pathlib import Path

import pytest

import fedfleet
from fedfleet.engine.errors import ConfigError
from fedfleet.tune.study.kept_results import line_of, restore_line

from .commands import LOCAL, invoke

T_OF_TWO = 4.302652729911275
"""The 97.5 % quantile of Student's t distribution with two degrees of freedom, from a table."""
LR = "method.rule.lr=0.01"


def settings(seed: int, **federation: int) -> fedfleet.Experiment:
    return fedfleet.Experiment(
        seed=seed,
        workload={"name": "digits", "model": "logistic"},
        method={"name": "fedavg", "rule": {"name": "sgd", "lr": 0.1}},
        federation={"clients": 10, "cohort": 3, "rounds": 4, "local": {"steps": 2, "batch": 8}, **federation},
        engine={"backend": "local", "block": 3, "kernels": "torch", "keep_state": True},
        evaluate={"every": 1},
        checkpoint={"every": 2},
        tracking={"uri": "none"},
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> list[tuple[fedfleet.Result, fedfleet.Result]]:
    """(parent, fork) for three seeds."""
    folder: Path = tmp_path_factory.mktemp("runs")
    parents = [fedfleet.run(settings(seed), folder / f"{seed}") for seed in range(3)]
    return [(parent, fedfleet.fork(parent, 2, LR, folder / f"{seed}-fork")) for seed, parent in enumerate(parents)]


def losses(runs: list[tuple[fedfleet.Result, fedfleet.Result]]) -> list[float]:
    return [fork.rows[-1]["eval/loss"] - parent.rows[-1]["eval/loss"] for parent, fork in runs]


def test_mean_and_interval_over_seeds(runs):
    table = fedfleet.compare([run for pair in runs for run in pair], "eval/loss", paired=True)
    (label,) = table.index
    assert label == "fedavg, fork.round 2, rule.lr 0.01"
    row, own = table.loc[label], losses(runs)
    half = T_OF_TWO * statistics.stdev(own) / math.sqrt(3)
    assert row["pairs"] == 3
    assert row["difference"] == pytest.approx(statistics.mean(own), rel=1e-12)
    assert [row["low"], row["high"]] == pytest.approx([statistics.mean(own) - half, statistics.mean(own) + half])
    assert row["equal rounds"] == 2
    assert 0 < row["models apart"] < 1


def test_one_pair_is_a_counterfactual_without_an_interval(runs):
    (parent, fork), *_ = runs
    done = invoke("compare", "--paired", str(parent.directory), str(fork.directory), "--metric", "eval/loss")
    assert done.exit_code == 0, done.output
    assert "eval/loss, differences from: fedavg, rule.lr 0.1" in done.stdout
    assert "needs two pairs" in done.stdout
    line = done.stdout.splitlines()[-1].split()
    assert line[-2:] == [f"{losses(runs)[0]:+.6g}", "2"]  # equal up to the round of the fork
    told = invoke("compare", str(parent.directory), str(fork.directory)).stdout
    assert "fork.round 2" in told


def test_refusals(runs, tmp_path):
    (parent, fork), (other, _), _ = runs
    larger = fedfleet.run(settings(0, cohort=4), tmp_path / "larger")
    for given, why in (
        ([parent, other], "no run has a partner of the same seed"),
        ([parent, parent], "have the same settings and the same seed 0"),
        ([parent, larger], r"federation\.cohort 3 and 4 draw other cohorts"),
    ):
        with pytest.raises(ConfigError, match=why):
            fedfleet.compare(given, "eval/loss", paired=True)
    with pytest.raises(ConfigError, match=r"--metric: run .* has no column eval/los;"):
        fedfleet.compare([parent, fork], "eval/los", paired=True)
    done = invoke("compare", "--paired", str(parent.directory), "--target", "0.5")
    assert (done.exit_code, len(done.stderr.splitlines())) == (2, 1)


def test_trials_of_a_search_leave_no_models(tmp_path):
    """The trials of a grid are pairs too. Of a model, only the distance is missing."""
    rates = "method.rule.lr={search: grid, values: [0.1, 0.01]}"
    done = invoke("search", "digits", *LOCAL, rates, "search.pruner=none", "--out", str(tmp_path / "search"))
    assert done.exit_code == 0, done.output
    finals = [
        json.loads((tmp_path / "search/trials" / trial / "result.json").read_text())["metrics"]["eval/accuracy"]
        for trial in ("0000", "0001")
    ]
    table = fedfleet.compare([tmp_path / "search"], paired=True)
    assert [table["pairs"].item(), table["equal rounds"].item()] == [1, 0]
    assert table["difference"].item() == finals[1] - finals[0]
    assert math.isnan(table["models apart"].item())
    assert list(fedfleet.compare([tmp_path / "search"])["eval/accuracy"]) == finals


def test_a_loss_that_was_kept_is_equal_to_the_one_that_it_was(runs, tmp_path):
    (parent, fork), *_ = runs
    assert parent.directory is not None
    line = line_of(parent.directory, {"train/loss"})
    assert line is not None
    assert line["rows"]["train/loss"] != [row["train/loss"] for row in parent.rows]
    restore_line(tmp_path / "kept", line)
    table = fedfleet.compare([tmp_path / "kept", fork], "eval/loss", paired=True)
    assert table["equal rounds"].item() == 2


def test_a_run_without_its_model_or_its_record(runs, tmp_path):
    """A run that has lost its model is compared, and one that has lost its record is not."""
    (parent, fork), *_ = runs
    assert parent.directory is not None
    copy = shutil.copytree(parent.directory, tmp_path / "copy")
    (copy / "model.safetensors").unlink()
    table = fedfleet.compare([copy, fork], "eval/loss", paired=True)
    assert table["equal rounds"].item() == 2
    assert math.isnan(table["models apart"].item())
    (copy / "rounds.parquet").write_bytes(b"PAR1")
    with pytest.raises(ConfigError, match="the result is damaged or incomplete"):
        fedfleet.compare([copy, fork], "eval/loss", paired=True)

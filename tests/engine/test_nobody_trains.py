"""Runs in which no client takes a local step: refused where that is known before the start, else told at the end; and
metrics that are no numbers, which are told as well."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fedfleet.engine.api import run
from fedfleet.engine.cohorts.samplers import binomial_size
from fedfleet.engine.config.schema import Experiment, experiment
from fedfleet.engine.errors import ConfigError
from fedfleet.tune.one_run import text_of
from fedfleet.tune.progress import Progress
from tests.engine.test_finite import Unreported, plan
from tests.tune.commands import LOCAL, invoke

LOST = {"systems": {"dropout": 1 - 1e-9}}
LATE = {"systems": {"devices": {"name": "equal", "compute": 1e6}}}
FEW = {"sampler": {"name": "poisson"}, "clients": 500, "cohort": 1, "rounds": 1}


def made(federation: dict[str, Any] | None = None, **more: Any) -> Experiment:
    data = plan(**more)
    data["federation"] |= federation or {}
    return experiment(data)


def seed_of_nobody() -> int:
    """A seed with which the coins of a single round leave everybody out."""
    return next(seed for seed in range(100) if not binomial_size(seed, 1, 500, 1 / 500))


@pytest.mark.parametrize(
    ("federation", "more"),
    [
        ({}, LOST),
        ({"pace": {"deadline": 60, "stragglers": "drop"}}, LATE),
        ({"pace": {"deadline": 60, "stragglers": "partial"}}, LATE),
        (FEW, {}),
    ],
    ids=["all lost", "all late", "no step in time", "coins"],
)
@pytest.mark.parametrize("method", [{"name": "fedavg"}, "scaffold"], ids=str)
def test_it_is_told(federation: dict[str, Any], more: dict[str, Any], method: Any, tmp_path: Path):
    """One sentence in the log, in the result and in what a command prints; and no loss in the record."""
    progress = Progress()
    result = run(made(federation, method=method, **more), tmp_path / "run", [progress])
    assert len(result.rows) == result.experiment.federation.rounds
    assert all(row["client/count"] == row["client/steps"] == 0 for row in result.rows)
    assert "train/loss" not in result.rows.columns
    assert "loss" not in progress.shown
    (sentence,) = result.warnings
    assert sentence == "no client took part in any round, so nothing was learned from the clients' data"
    assert sentence in (tmp_path / "run" / "run.log").read_text()
    assert json.loads((tmp_path / "run" / "result.json").read_text())["warnings"] == [sentence]
    text = text_of(result, 1.0)
    assert text.endswith(f"\nwarning: {sentence}")
    assert "nan" not in text
    assert "train/loss" not in text


def test_a_command_prints_it_and_ends_well(tmp_path: Path):
    options = (f"systems.dropout={1 - 1e-9}", "--out", str(tmp_path / "run"))
    done = invoke("run", "digits", *LOCAL, *options)
    assert done.exit_code == 0, done.output
    assert "\nwarning: no client took part in any round, so nothing was learned" in done.output


def test_a_run_with_some_rounds_without_clients_is_no_warning():
    result = run(made({**FEW, "rounds": 6}, evaluate={"every": 1}))
    assert {0, 1} <= {min(1, row["client/count"]) for row in result.rows}
    assert result.warnings == []
    assert all(("train/loss" in row) == (row["client/count"] > 0) for row in result.rows)


SILENT = {"name": "drop", "clients": list(range(10))}
REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"attack": SILENT}, r"^attack: drop has all clients send nothing in all rounds, got 10 Byzantine"),
    ({}, {"attack": {**SILENT, "rounds": "1-3"}}, r"^attack: drop has all clients send nothing"),
    ({}, {"attack": {"name": "drop", "share": 0.99}}, r"^attack: drop has all clients send nothing"),
    ({"without": [0, 4]}, {"attack": {"name": "drop", "clients": [1, 2, 3, 5, 6, 7, 8, 9]}}, r"^attack: drop has all"),
    (
        {"sampler": "binomial", "clients": 500, "cohort": 1, "rounds": 1},
        {"seed": seed_of_nobody()},
        r"^federation.sampler: binomial draws no client in any of the 1 rounds, .*; raise federation.cohort or ",
    ),
    ({"local": {"steps": 0}}, {}, r"^federation.local.steps must be greater than or equal to 1, got 0"),
]  # fmt: skip


@pytest.mark.parametrize(("federation", "more", "words"), REFUSED)
def test_it_is_refused_where_it_is_known(federation: dict[str, Any], more: dict[str, Any], words: str):
    with pytest.raises(ConfigError, match=words):
        run(made(federation, **more))


def test_silence_in_some_rounds_is_allowed():
    result = run(made(attack={**SILENT, "rounds": "1-2"}))
    assert [row["client/count"] for row in result.rows] == [0, 0, 5]
    assert result.warnings == []


def test_a_metric_that_is_no_number_is_told():
    result = run(Experiment.model_validate(plan(Unreported())))
    assert result.warnings == ["eval/loss: not a number at the end, see the log of the run"]
    assert text_of(result, 1.0).endswith("\nwarning: eval/loss: not a number at the end, see the log of the run")
    assert "nan" not in text_of(result, 1.0)

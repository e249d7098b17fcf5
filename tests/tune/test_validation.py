"""Settings are chosen on rows for validation, where a study or a search has them, and never on test rows there."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fedfleet.engine import run
from fedfleet.engine.config.schema import experiment
from fedfleet.engine.errors import ConfigError
from fedfleet.engine.records.metrics import better, on_validation
from fedfleet.engine.runs.saved_files import read_rows
from fedfleet.tune.report.findings import chosen_by, findings
from fedfleet.tune.report.sensitivity import grids
from fedfleet.tune.search.plan import plan
from fedfleet.tune.study.cells import Cell, cells, trials
from fedfleet.tune.study.check import check_held_out, check_metrics, checked, with_direction
from fedfleet.tune.study.folder import StudyFolder
from fedfleet.tune.study.kept_results import check_restored
from fedfleet.tune.study.searches import searches
from fedfleet.tune.study.spec import Study, study
from fedfleet.tune.study_run.runner import run_study
from fedfleet.tune.units import in_words, is_share
from fedfleet.tune.validation import fraction

from .small_study import STUDY

RATES = {"search": "grid", "values": [0.1, 0.01]}


def of(validation: float, /, **tune: Any) -> Study:
    data = {
        "name": "s",
        "experiment": {
            "workload": {"name": "digits", "model": "logistic"},
            "federation": {"clients": 4, "cohort": 2, "rounds": 1},
            "evaluate": {"validation": validation},
        },
        "methods": {"FedAvg": {"name": "fedavg", "rule": {"name": "sgd", "lr": RATES}}},
        "tune": {"each": "level", **tune},
    }
    return study(data)


def test_a_study_decides_by_validation():
    assert of(0.2).deciding == "eval/validation_accuracy"
    assert of(0.0).deciding == "eval/accuracy"
    assert of(0.2, metric="eval/validation_loss").deciding == "eval/validation_loss"
    assert chosen_by(of(0.2)) == "by validation accuracy, on 20% of each client's rows"
    assert chosen_by(of(0.0)) == "by the reported metric on the test set"
    check_metrics(of(0.2))


@pytest.mark.parametrize("metric", ["eval/accuracy", "eval/loss"])
def test_a_study_with_validation_does_not_decide_by_test_rows(metric):
    instead = metric.replace("eval/", "eval/validation_")
    with pytest.raises(ConfigError, match=f"tune.metric: choices are made on validation rows, got .*choose {instead}"):
        check_metrics(of(0.2, metric=metric))
    check_metrics(of(0.0, metric=metric))


def test_trials_alone_may_hold_rows_out():
    made = of(0.0, validation=0.2)
    assert made.deciding == "eval/validation_accuracy"
    assert chosen_by(made) == "by validation accuracy, on 20% of each client's rows, which only the trials held out"
    assert [fraction(cell.data) for cell in trials(made)] == [0.2, 0.2]
    assert [fraction(cell.data) for cell in cells(made)] == [0.0]
    check_metrics(made.model_copy(update={"report": made.report.model_copy(update={"best_round": True})}))
    with pytest.raises(ConfigError, match=r"tune\.metric: choices are made on validation rows, got eval/loss"):
        check_metrics(of(0.0, validation=0.2, metric="eval/loss"))
    with pytest.raises(ConfigError, match=r"tune\.validation: .*evaluate\.validation is 0\.1, got 0\.2; drop one"):
        check_metrics(of(0.1, validation=0.2))


def test_a_search_of_a_study_holds_rows_out():
    made = of(0.0, validation=0.2, rounds=1)
    wide = {"name": "fedavg", "rule": {"name": "sgd", "lr": {"search": "loguniform", "low": 0.01, "high": 1}}}
    (searched,) = searches(with_direction(made.model_copy(update={"methods": {"FedAvg": wide}}))).values()
    assert searched["evaluate"] == {"validation": 0.2}
    assert list(searched["search"]["objectives"]) == ["eval/validation_accuracy"]


@pytest.mark.parametrize("tune", [{"each": "level"}, {"each": "level", "rounds": 1}, {"each": "none"}])
def test_rows_that_trials_cannot_hold_out_are_refused_before_they_run(tune: dict[str, Any]):
    """A client of the quadratic workload has one row. Without trials nothing is held out."""
    made = of(0.0, validation=0.2, **tune)
    one_row = {**made.experiment, "workload": "quadratic"}
    report = made.report.model_copy(update={"metric": "eval/loss"})
    made = made.model_copy(update={"experiment": one_row, "report": report})
    if made.tune.each == "none":
        checked(made)
        return
    with pytest.raises(ConfigError, match=r"^tune\.validation: no client has a row for it, got clients of 1 rows"):
        checked(made)


@pytest.mark.parametrize("given", [{"metric": "train/loss"}, {"report": "server/lr"}])
def test_trials_that_would_hold_rows_out_and_not_decide_by_them_are_refused(given: dict[str, str]):
    made = of(0.0, validation=0.2, **{key: value for key, value in given.items() if key == "metric"})
    if "report" in given:
        made = made.model_copy(update={"report": made.report.model_copy(update={"metric": given["report"]})})
    why = rf"^tune\.validation: {next(iter(given.values()))} would decide, .* got 0\.2; set tune\.metric to a column"
    with pytest.raises(ConfigError, match=why):
        check_held_out(made)


def test_a_study_without_trials_goes_on_from_what_was_kept(tmp_path: Path):
    """No run of it has rows for validation, and none needs them. Trials that were kept need what they are chosen by."""
    made = of(0.0, validation=0.2, each="none")
    place = tmp_path / "cells" / "a1"
    place.mkdir(parents=True)
    (place / "result.json").write_text('{"rounds": 1}')
    for column in ("eval/accuracy", "eval/validation_loss"):
        pq.write_table(pa.table({"round": [1], "eval/accuracy": [0.5], column: [0.5]}), place / "rounds.parquet")
        if column == "eval/accuracy":
            check_restored(tmp_path, made.columns, made.columns_of_trials)
    with pytest.raises(ConfigError, match="has not kept eval/validation_accuracy"):
        check_restored(tmp_path, made.columns, made.columns_of_trials)


def test_what_was_held_out_is_said_to_three_digits():
    assert chosen_by(of(0.125)) == "by validation accuracy, on 12.5% of each client's rows"
    assert "on 0.4% of each" in chosen_by(of(0.0, validation=0.004))


def test_a_method_that_is_chosen_by_another_column_is_named():
    made = of(0.0, validation=0.2)
    named = made.report.model_copy(update={"metrics": {"FedAvg": "eval/auc"}})
    told = chosen_by(made.model_copy(update={"report": named}))
    assert told.startswith("by validation accuracy (FedAvg by validation AUC), on 20% of each client's rows, ")


def last_row(folder: StudyFolder, cell: Cell) -> dict[str, Any]:
    return read_rows(folder.of(cell) / "rounds.parquet")[-1]


def check_progress(told: str, percent: list[float]) -> None:
    """The lines of trials have what decides, and the best cell is none of the trials."""
    lines = [line for line in told.splitlines() if re.match(r"(trial|cell) \d", line)]
    of_trials, of_cells = ([line for line in lines if line.startswith(what)] for what in ("trial", "cell"))
    shown = [float(found[1]) for line in of_trials if (found := re.search(r"\): ([\d.]+) %", line))]
    assert sorted(shown) == pytest.approx(sorted(percent), abs=0.05)
    first = re.fullmatch(r"cell 1/4  (.*?seed \d).*: ([\d.]+ %); .*, best ([\d.]+ %) \((.*)\).*", of_cells[0])
    assert first is not None
    assert (first[1], first[2]) == (first[4], first[3])


def test_the_runs_of_a_tuned_study_train_on_all_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The trials choose by other rows than the runs are reported by, and what they chose is said."""
    data = {**STUDY, "name": "small", "axes": {}, "tune": {"each": "level", "validation": 0.25, "rounds": 3}}
    outcome, text = run_study(study(data), tmp_path / "out", jobs=1)
    assert outcome.finished == 4
    folder = StudyFolder(tmp_path / "out")
    by_rate: dict[float, list[float]] = {}
    for trial in trials(folder.study):
        by_rate.setdefault(trial.settings["method.rule.lr"], []).append(
            float(last_row(folder, trial)["eval/validation_accuracy"])
        )
    best = max(by_rate, key=lambda rate: sum(by_rate[rate]))
    check_progress(capsys.readouterr().err, [100 * value for some in by_rate.values() for value in some])
    (grid,) = grids(findings(folder))
    assert grid.values == {(rate,): pytest.approx(np.mean(some)) for rate, some in by_rate.items()}
    assert (grid.best, grid.found.unit) == ((best,), "validation accuracy (%)")
    page = (folder.path / "report.md").read_text("utf-8")
    assert "Trials are shown by what decided: validation accuracy (%)." in page
    for cell in folder.cells():
        assert "eval/validation_accuracy" not in last_row(folder, cell)
        assert cell.settings == ({"method.rule.lr": best} if cell.method == "FedAvg" else {})
        result = json.loads((folder.of(cell) / "result.json").read_text("utf-8"))
        assert run(experiment(cell.data)).model_sha256 == result["model_sha256"]
    assert "in trials of 3 rounds" in text


def test_a_search_decides_by_validation():
    data = {"workload": "digits", "method": {"name": "fedavg", "rule": {"name": "sgd", "lr": RATES}}}
    assert list(plan(data).settings.objectives) == ["eval/accuracy"]
    validated = {**data, "evaluate": {"validation": 0.1}}
    assert list(plan(validated).settings.objectives) == ["eval/validation_accuracy"]
    with pytest.raises(ConfigError, match=r"search\.objectives: choices are made on validation rows, got eval/loss"):
        plan({**validated, "search": {"objectives": {"eval/loss": "min", "bytes": "min"}}})


def test_names_of_metrics():
    assert on_validation("eval/clients/test_accuracy_worst") == "eval/clients/validation_accuracy_worst"
    assert (
        on_validation("train/loss")
        is on_validation("eval/validation_auc")
        is on_validation("eval/clients/loss")
        is None
    )
    assert better("eval/validation_loss") == better("eval/clients/validation_loss_worst") == "min"
    assert better("eval/validation_auc") == "max"
    assert is_share("eval/validation_accuracy")
    assert in_words("eval/validation_auc") == "validation AUC"

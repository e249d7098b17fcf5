"""Settings are chosen on rows for validation, where a study or a search has them, and never on test rows there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fedfleet.engine import run
from fedfleet.engine.config.schema import experiment
from fedfleet.engine.errors import ConfigError
from fedfleet.engine.records.metrics import better, on_validation
from fedfleet.engine.runs.saved_files import read_rows
from fedfleet.tune.report.findings import chosen_by
from fedfleet.tune.search.plan import plan
from fedfleet.tune.study.cells import Cell, cells, trials
from fedfleet.tune.study.check import check_metrics, with_direction
from fedfleet.tune.study.folder import StudyFolder
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


def last_row(folder: StudyFolder, cell: Cell) -> dict[str, Any]:
    return read_rows(folder.of(cell) / "rounds.parquet")[-1]


def test_the_runs_of_a_tuned_study_train_on_all_rows(tmp_path: Path):
    """The trials choose by other rows than the runs are reported by, and what they chose is said."""
    data = {**STUDY, "name": "small", "axes": {}, "tune": {"each": "level", "validation": 0.25, "rounds": 3}}
    outcome, text = run_study(study(data), tmp_path / "out", jobs=1, quiet=True)
    assert outcome.finished == 4
    folder = StudyFolder(tmp_path / "out")
    by_rate: dict[float, list[float]] = {}
    for trial in trials(folder.study):
        by_rate.setdefault(trial.settings["method.rule.lr"], []).append(
            float(last_row(folder, trial)["eval/validation_accuracy"])
        )
    best = max(by_rate, key=lambda rate: sum(by_rate[rate]))
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

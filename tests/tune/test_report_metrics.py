"""Methods that are reported and tuned by columns of their own, as those whose clients adapt their models."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from fedfleet.engine.errors import ConfigError
from fedfleet.tune.report.files import write_report
from fedfleet.tune.report.findings import findings
from fedfleet.tune.run_files import read_columns
from fedfleet.tune.study.cells import Cell, cells, trials
from fedfleet.tune.study.check import checked
from fedfleet.tune.study.folder import StudyFolder
from fedfleet.tune.study.kept_results import restore
from fedfleet.tune.study.spec import Study, study
from fedfleet.tune.study_run.runner import run_study

OWN, ADAPTED = "eval/own/test_accuracy", "eval/adapted/test_accuracy"


def tuned(metrics: dict[str, str], **adapt: Any) -> Study:
    """FedAvg twice, of which the second one may be reported by another column, with a grid of two step sizes."""
    method = {"name": "fedavg", "rule": {"name": "sgd", "lr": {"search": "grid", "values": [0.01, 0.5]}}}
    clients = {"own": True, "adapt": {"steps": 2, **adapt}}
    experiment = {
        "workload": {"name": "digits", "partition": {"name": "dirichlet", "beta": 0.1}},
        "federation": {"clients": 4, "cohort": 2, "rounds": 1, "local": {"steps": 2, "batch": 8}},
        "evaluate": {"every": 0, "held_out": 0.2, "validation": 0.1, "clients": clients},
    }
    return study(
        {
            "name": "tuned",
            "experiment": experiment,
            "methods": {"FedAvg": method, "FedAvg+FT": method},
            "tune": {"each": "level"},
            "report": {"metric": OWN, "metrics": metrics, "against": ["FedAvg"]},
            "tracking": {"uri": "none"},
        }
    )


@pytest.mark.long
def test_a_method_is_reported_and_tuned_by_its_own_column(tmp_path: Path):
    made = tuned({"FedAvg+FT": ADAPTED})
    assert made.deciding_of("FedAvg") == "eval/own/validation_accuracy"
    assert made.deciding_of("FedAvg+FT") == "eval/adapted/validation_accuracy"
    run_study(made, tmp_path, jobs=1, quiet=True)
    folder = StudyFolder(tmp_path)
    assert len(list((tmp_path / "cells").iterdir())) == 2  # both methods have the same runs
    columns = {cell.method: read_columns(folder.of(cell)) for cell in folder.cells()}
    finals = {run.method: run.final for run in findings(folder).runs}
    assert finals == {"FedAvg": columns["FedAvg"][OWN][-1], "FedAvg+FT": columns["FedAvg+FT"][ADAPTED][-1]}
    chosen = {cell.method: cell.settings["method.rule.lr"] for cell in folder.cells()}
    for name, lr in chosen.items():
        tried = {run: read_columns(run)[made.deciding_of(name)][-1] for run in (tmp_path / "cells").iterdir()}
        best = max(tried, key=lambda run: tried[run])
        assert columns[name][OWN][-1] == read_columns(best)[OWN][-1], (name, lr)

    text = (tmp_path / "report.md").read_text()
    assert "## Clients that are better or worse off" in text
    assert "| FedAvg | FedAvg+FT |" in text
    shutil.rmtree(tmp_path / "cells")  # what a repository keeps has the same numbers
    restore(tmp_path)
    write_report(folder)
    assert (tmp_path / "report.md").read_text() == text


def test_methods_that_share_trials_choose_by_their_own_columns():
    """The two methods have the same settings, and so the same trials."""
    made = tuned({"FedAvg+FT": ADAPTED})

    def score(cell: Cell) -> float:
        lr = cell.settings["method.rule.lr"]
        return lr if made.deciding_of(cell.method) == "eval/own/validation_accuracy" else -lr

    assert len(trials(made)) == 2
    chosen = {cell.method: cell.settings["method.rule.lr"] for cell in cells(made, score)}
    assert chosen == {"FedAvg": 0.5, "FedAvg+FT": 0.01}


def test_a_column_that_a_method_does_not_record_is_refused():
    with pytest.raises(ConfigError, match=r"report\.metrics\.FedAvg\+FT: no run will record eval/adapted/test_acc"):
        checked(tuned({"FedAvg+FT": "eval/adapted/test_acc"}))
    with pytest.raises(ConfigError, match=r"report\.against: the study has no method FedAvg"):
        study({**tuned({}).model_dump(mode="json"), "methods": {"Ditto": "ditto"}})
    with pytest.raises(ConfigError, match=r"report\.metrics: the study has no method FedAvg\+TF; did you mean"):
        tuned({"FedAvg+TF": ADAPTED})

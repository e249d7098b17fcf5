"""A metric that no run will record is refused before a cell or a trial is run, and the message names the section of the
key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedfleet.engine.api import run
from fedfleet.engine.config.schema import experiment
from fedfleet.engine.errors import ConfigError
from fedfleet.engine.runs.expected_columns import check_column, columns, quick
from fedfleet.tune.files import load_data
from fedfleet.tune.study.check import checked
from fedfleet.tune.study.spec import load
from fedfleet.workloads.data.digits import Digits
from fedfleet.workloads.models.small import Logistic

from .commands import LOCAL, invoke
from .small_study import STUDY, written

pytestmark = pytest.mark.usefixtures("one_fork_server")


def refused(folder: Path, *overrides: str, **changes: Any) -> str:
    """The message for the study with these changes; no cell of it has been run."""
    done = invoke("study", written(folder, **changes), *overrides, "--out", str(folder / "out"))
    assert done.exit_code == 2, done.output
    assert not (folder / "out").exists()
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    return line


# --- columns ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("key", ["report", "tune"])
@pytest.mark.parametrize("metric", ["eval/acuracy", "accuracy", "eval/auc", "train/los"])
def test_a_column_that_no_run_records(tmp_path: Path, key: str, metric: str):
    change = {"each": "cell", "metric": metric} if key == "tune" else {"metric": metric}
    message = refused(tmp_path, **{key: {**STUDY.get(key, {}), **change}})
    assert message.startswith(f"error: {key}.metric: no run will record {metric}; ")
    for column in ("eval/loss", "eval/accuracy", "train/loss", "server/lr"):
        assert column in message


@pytest.mark.parametrize("metric", ["eval/loss", "train/loss", "server/lr", "comm/bytes_up", "time/seconds"])
def test_columns_of_all_kinds(tmp_path: Path, metric: str):
    checked(load(written(tmp_path, report={"metric": metric})))


@pytest.mark.parametrize(("adapt", "count"), [({"epochs": 3}, 1), ([{"steps": 5}, {"epochs": 2, "batch": "all"}], 2)])
def test_columns_of_adaptations_need_one_step(adapt: Any, count: int):
    plain = experiment(load_data("digits", LOCAL))
    evaluate = plain.evaluate.model_validate(
        {"every": 5, "held_out": 0.2, "validation": 0.1, "clients": {"adapt": adapt}}
    )
    wanted = plain.model_copy(update={"evaluate": evaluate})
    small = quick(evaluate).clients
    assert small is not None
    assert [(each.steps, each.epochs) for each in small.adaptations] == [(1, None)] * count
    found = columns(wanted)
    assert found is not None
    assert {f"eval/adapted{place}/test_loss" for place in ("", "@2")[:count]} <= {*found}
    assert {*run(wanted).rows[-1]} <= {*found}


def test_no_data_are_loaded_for_the_columns_of_a_classification(monkeypatch: pytest.MonkeyPatch):
    loaded, real = [], Digits.load
    monkeypatch.setattr(Digits, "load", lambda self: loaded.append(self) or real(self))
    plain = experiment(load_data("digits", ()))
    for name in ("eval/loss", "eval/accuracy"):
        check_column(name, "metric", [plain])
    assert not loaded
    with pytest.raises(ConfigError, match="no run will record eval/auc"):
        check_column("eval/auc", "metric", [plain])
    assert len(loaded) == 1

    class Own(Digits):
        def report(self, p: Any, batch: Any) -> Any:
            return {"mine": super().report(p, batch)["loss"]}

    own = plain.model_copy(update={"workload": Own(Logistic())})
    with pytest.raises(ConfigError, match="no run will record eval/accuracy"):
        check_column("eval/accuracy", "metric", [own])


def test_a_column_of_one_method_alone(tmp_path: Path):
    """Some methods record more columns about the server's step than others."""
    methods = {"FedSgd": {"name": "fedsgd"}, **STUDY["methods"]}
    plugin = tmp_path / "own.py"
    plugin.write_text(
        "from dataclasses import dataclass\n"
        "from fedfleet.algorithms.fedavg import fedavg\n"
        "from fedfleet.algorithms.local import LocalMethod\n"
        "class Telling(LocalMethod):\n"
        "    def server_metrics(self, server, mean, round):\n"
        "        return {'mine': mean.facts['norm2']}\n"
        "def fedsgd():\n"
        "    made = fedavg()\n"
        "    return Telling(made.rule, made.estimator, made.server)\n"
        "METHODS = {'fedsgd': fedsgd}\n"
    )
    checked(load(written(tmp_path, methods=methods, plugins=[str(plugin)], report={"metric": "server/mine"})))
    message = refused(tmp_path, methods=methods, plugins=[str(plugin)], report={"metric": "server/min"})
    assert "did you mean server/mine?" in message


def test_a_column_of_one_workload_alone(tmp_path: Path):
    axes = {"set": {"a": {"workload": {"name": "logistic", "rows": 20}}, "b": {"workload": {"name": "linear"}}}}
    message = refused(tmp_path, axes=axes)
    assert "no run will record eval/accuracy" in message


@pytest.mark.parametrize(("name", "fairness"), [("digits", "true"), ("counterexample", "false")])
def test_they_are_those_of_a_run(name: str, fairness: str):
    data = load_data(name, [*LOCAL, "federation.rounds=1", f"evaluate.fairness={fairness}"])
    found = columns(experiment(data))
    assert found is not None
    assert set(found) == set(run(experiment(data)).rows[0])


def test_an_objective_that_no_trial_records(tmp_path: Path):
    lr = "method.rule.lr={search: loguniform, low: 1e-3, high: 1}"
    done = invoke(
        *("search", "digits", *LOCAL, lr, "search.objectives={eval/acuracy: max}", "--out", str(tmp_path / "out"))
    )
    assert done.exit_code == 2, done.output
    assert "search.objectives: no run will record eval/acuracy; did you mean eval/accuracy?" in done.stderr
    assert not (tmp_path / "out").exists()


# --- sections ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("override", "begins"),
    [
        ("experiment.federation.cohrt=3", "experiment.federation.cohrt is not a key"),
        ("experiment.federation.cohort=30", "experiment.federation.cohort: cohort <= clients must hold"),
        ("experiment.workload.dimm=3", "experiment.workload.dimm is not an argument of logistic"),
        ("experiment.workload.rows=0", "experiment.workload"),
        ("experiment.engine.device=gpu", "experiment.engine.device: must be auto"),
        ("methods.SCAFFOLD.rule.name=sgdd", "methods.SCAFFOLD.rule.name: no rule is called sgdd"),
        ("methods.SCAFFOLD.rule.lr=fast", "methods.SCAFFOLD.rule.lr must be a valid number"),
        ("methods.FedAvg.server_lrr=1", "methods.FedAvg.server_lrr is not an argument of fedavg"),
        ("report.best=most", "report.best must be"),
        ("tune.trials=0", "tune.trials must be"),
        ("reduced.scale=-1", "reduced.scale must be"),
        ("tracking.uri=ftp://x", "tracking.uri must be"),
    ],
)
def test_sections_of_a_study(tmp_path: Path, override: str, begins: str):
    message = refused(tmp_path, override)
    assert message.startswith(f"error: {begins}"), message


def test_a_method_that_refuses_the_model(tmp_path: Path):
    """An error in a method's arguments is not reported as an error of the workload."""
    done = invoke("run", "digits", *LOCAL, "method={name: fedmud, ratio: 1e-9}")
    assert done.exit_code == 2
    assert done.stderr.startswith("error: method")


# --- ranges -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("command", ["run", "show", "partition"])
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("method.rule.lr", "{search: loguniform, low: 1e-3, high: 1}"),
        ("method.rule.lr", "{search: logunifrm, low: 1e-3, high: 1}"),
        ("federation.local.steps", "{search: int, low: 1, high: 8}"),
        ("method.rule", "{search: choice, values: [sgd, adam]}"),
        ("workload.partition.beta", "{search: grid, values: [0.1, 1]}"),
    ],
)
def test_a_range_given_to_a_command_that_wants_values(command: str, key: str, value: str):
    done = invoke(command, "digits", *(LOCAL if command == "run" else ()), f"{key}={value}")
    assert done.exit_code == 2
    assert done.stderr.startswith(f"error: {key} is a range, got ")
    assert done.stderr.rstrip().endswith("give a value, or have `fedfleet search` choose one")


def test_a_range_given_in_python():
    with pytest.raises(ConfigError, match=r"^method\.rule\.lr is a range"):
        experiment({"workload": "digits", "method": {"name": "fedavg", "rule": {"lr": {"search": "grid"}}}})

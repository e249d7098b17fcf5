"""The trackers beside MLflow, read back as their users read them: event files by TensorBoard, CSV by the standard
library, and offline runs of Weights & Biases by the package wandb."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import pytest

from fedfleet.engine import Experiment, run
from fedfleet.engine.api import run as start
from fedfleet.engine.config.schema import Tracking, experiment
from fedfleet.engine.errors import ConfigError, Interrupted
from fedfleet.engine.records.history import History
from fedfleet.tune.files import load
from fedfleet.tune.search.run import search
from fedfleet.tune.study.spec import StudyTracking
from fedfleet.tune.tracking import writer as writers
from fedfleet.tune.tracking.folder_writer import append

from ..faults.runs import Watch, interrupt
from .commands import invoke

pytestmark = pytest.mark.usefixtures("here", "one_fork_server")


PLUGIN = """
from fedfleet import Observer


class Lines(Observer):
    def record(self, record):
        with open("lines.txt", "a") as file:
            print(int(record["round"]), file=file)


def folders(directory):
    with open("folders.txt", "w") as file:
        file.write(directory)
    return Observer()


TRACKERS = {"lines": Lines, "folders": folders}
"""


def small(tracking: Any, **more: Any) -> dict[str, Any]:
    return {
        "workload": "quadratic",
        "method": {"name": "fedavg", "rule": {"name": "sgd", "lr": 0.1}},
        "federation": {"clients": 4, "cohort": 2, "rounds": 4},
        "evaluate": {"every": 2},
        "engine": {"backend": "local"},
        "tracking": tracking,
        **more,
    }


def lines(file: Path) -> list[dict[str, str]]:
    with file.open(newline="") as opened:
        return list(csv.DictReader(opened))


def events(folder: Path) -> Any:
    """What TensorBoard shows of a folder."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = accumulator.EventAccumulator(str(folder), {"scalars": 0})
    found.Reload()
    return found


def same(rows: History, column: str, found: dict[int, float], tolerance: float) -> None:
    values, measured = rows.column(column)
    rounds = rows.column("round")[0]
    wanted = dict(zip(rounds[measured].astype(int).tolist(), values[measured].tolist(), strict=True))
    assert found == pytest.approx(wanted, rel=tolerance)


# --- the setting ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({}, ("mlflow",)),
        ("none", ()),
        ({"uri": "none"}, ()),
        ({"name": ["csv", "tensorboard"], "uri": "none"}, ()),
        ("tensorboard", ("tensorboard",)),
        (["mlflow", "csv", "csv"], ("mlflow", "csv")),
        ({"name": "mlflow", "uri": "sqlite:///x.db", "experiment": "mine"}, ("mlflow",)),
    ],
)
def test_names(given: Any, names: tuple[str, ...]):
    made = experiment(small(given))
    assert made.tracking.names == names
    assert experiment(json.loads(json.dumps(made.plain()))).tracking == made.tracking
    assert StudyTracking.model_validate(given).names == names


def test_keys_of_a_list_of_names():
    made = load("digits", ["tracking=[csv, tensorboard]", "tracking.clients=true"])
    assert made.tracking == Tracking(name=("csv", "tensorboard"), clients=True)


def test_an_unknown_tracker():
    with pytest.raises(ConfigError, match=r"tracking\.name: no tracker is called tensorbord; did you mean tensorboard"):
        run(Experiment(**small("tensorbord")))


@pytest.mark.parametrize(("name", "package"), [("tensorboard", "tensorboardX"), ("wandb", "wandb")])
def test_a_missing_package_is_told(name: str, package: str, here: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(writers, "find_spec", lambda name: None)
    done = invoke("run", "digits", "engine.backend=local", f"tracking={name}", "--out", "mine")
    told = f'error: tracking: {name} needs the package {package}, got none; pip install "fedfleet[{name}]"\n'
    assert (done.exit_code, done.stderr) == (2, told)  # before the first line
    assert not list(here.glob("mine/*"))


# --- runs -------------------------------------------------------------------------------------------------------------
def test_tensorboard_and_csv_have_what_the_records_have(here: Path):
    done = run(Experiment(**small(["tensorboard", "csv"])), "mine")
    rows = lines(here / "mine" / "rounds.csv")
    assert [int(row["round"]) for row in rows] == [1, 2, 3, 4]
    assert [row["eval/loss"] == "" for row in rows] == [True, False, True, False]
    for column in ("train/loss", "eval/loss", "comm/bytes_up"):
        same(done.rows, column, {int(row["round"]): float(row[column]) for row in rows if row[column]}, 0)
    shown = events(here / "mine" / "tensorboard")
    for column in ("train/loss", "eval/loss"):
        same(done.rows, column, {e.step: e.value for e in shown.Scalars(column)}, 2**-23)  # scalars are float32
    assert "round" not in shown.Tags()["scalars"]
    assert not (here / "mlflow.db").exists()


def test_a_run_that_goes_on_has_every_round_once(here: Path):
    made = experiment(small(["tensorboard", "csv"], federation={"clients": 4, "cohort": 2, "rounds": 6}))
    with pytest.raises(Interrupted):
        start(made, "mine", [Watch(r3=interrupt)])
    done = invoke("resume", "mine", "--quiet")
    assert (done.exit_code, done.stderr) == (0, "")
    assert [int(row["round"]) for row in lines(here / "mine" / "rounds.csv")] == [1, 2, 3, 4, 5, 6]
    shown = events(here / "mine" / "tensorboard").Scalars("train/loss")
    assert [event.step for event in shown] == [1, 2, 3, 4, 5, 6]


def test_no_link_in_the_folder_is_followed(here: Path, capsys: pytest.CaptureFixture[str]):
    """A run goes on without the tracker whose folder is a link, and replaces a file that is one."""
    for path in (here / "mine", here / "elsewhere"):
        path.mkdir()
    (here / "kept.csv").write_text("mine")
    (here / "mine" / "tensorboard").symlink_to(here / "elsewhere")
    (here / "mine" / "rounds.csv").symlink_to(here / "kept.csv")
    run(Experiment(**small(["tensorboard", "csv"])), "mine")
    assert not list((here / "elsewhere").iterdir())
    assert (here / "kept.csv").read_text() == "mine"
    assert len(lines(here / "mine" / "rounds.csv")) == 4
    assert "it is a symbolic link, where a folder must be" in capsys.readouterr().err


def test_lines_are_not_appended_to_a_link(here: Path):
    (here / "kept.csv").write_text("mine")
    (here / "rounds.csv").symlink_to(here / "kept.csv")
    with pytest.raises(OSError, match="it is a symbolic link, where a plain file must be"):
        append(here / "rounds.csv", "more")
    assert (here / "kept.csv").read_text() == "mine"


def test_a_run_without_a_folder_has_one_for_its_trackers(here: Path):
    done = run(Experiment(**small(["csv"])))
    assert len(lines(here / "runs" / done.run_id / "rounds.csv")) == 4


def test_offline_runs_of_wandb(here: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    done = run(Experiment(**small("wandb")), "mine")
    (kept,) = (here / "mine" / "wandb").glob("offline-run-*")
    (data,) = kept.glob("*.wandb")
    assert data.stat().st_size > 0
    assert done.run_id in kept.name


def test_a_tracker_of_a_plug_in_takes_what_it_wants(here: Path):
    (here / "mine.py").write_text(PLUGIN)
    run(Experiment(**small(["lines", "folders"], plugins=["mine.py"])), "mine")
    assert (here / "lines.txt").read_text() == "1\n2\n3\n4\n"
    assert (here / "folders.txt").read_text() == str(here / "mine")


# --- many runs --------------------------------------------------------------------------------------------------------
def test_a_search_has_a_file_for_each_trial(here: Path):
    ranged = small(["tensorboard", "csv"], search={"objectives": {"eval/loss": "min"}})
    ranged["method"] = {"name": "fedavg", "rule": {"name": "sgd", "lr": {"search": "grid", "values": [0.05, 0.1]}}}
    found = search(ranged, here / "s")
    rows = {int(row["trial"]): float(row["eval/loss"]) for row in lines(here / "s" / "csv" / "search.csv")}
    assert rows == {trial.number: trial.values[0] for trial in found.trials}
    for trial in found.trials:
        records = History(found.records(trial.number))
        (file,) = (here / "s" / "csv").glob(f"*{trial.key} rule.lr {[0.05, 0.1][trial.number]}.csv")
        same(records, "train/loss", {int(r["round"]): float(r["train/loss"]) for r in lines(file)}, 0)
        (folder,) = (here / "s" / "tensorboard").glob(f"*{trial.key} rule.lr *")
        shown = events(folder)
        assert [event.step for event in shown.Scalars("train/loss")] == [1, 2, 3, 4]
        assert math.isclose(shown.Scalars("objective/eval/loss")[0].value, trial.values[0], rel_tol=2**-23)
    assert not (here / "mlflow.db").exists()

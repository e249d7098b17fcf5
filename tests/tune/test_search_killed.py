"""Searches that are killed or asked to stop and then resumed, started as from a user's shell."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from fedfleet.engine import run
from fedfleet.tune.search.optuna_storage import storage_url
from fedfleet.tune.search.plan import plan
from fedfleet.tune.search.run import search
from fedfleet.tune.search.trial_store import TrialStore

from .commands import COMMAND, until
from .test_search import EXCESS, spec

pytestmark = pytest.mark.long

ROUNDS = 400
"""Rounds of a trial. It takes seconds, so that a signal comes in the middle of a trial."""


def ended(folder: Path) -> list[int]:
    """The numbers of the trials whose runs are complete."""
    return sorted(int(path.parent.name) for path in folder.glob("trials/*/result.json"))


def under_way(folder: Path) -> list[int]:
    """The numbers of the trials that have logged thirty rounds and have not ended."""
    logs = [path for path in folder.glob("trials/*/run.log") if path.read_text().count("\n") > 30]
    return sorted(set(int(path.parent.name) for path in logs) - set(ended(folder)))


def written(here: Path, address: str | None = None, **asked: Any) -> Path:
    """Write the file of the search; returns its path. address: of a Ray that outlives the search."""
    made = spec(
        {"name": "sgd", "lr": {"search": "loguniform", "low": 1e-5, "high": 1e-1}},
        ROUNDS,
        engine={"backend": "local", "address": address},
        evaluate={"every": 20},
        tracking={"uri": f"sqlite:///{here / 'mlflow.db'}"},
        search={**EXCESS, "trials": 4, **asked},
    )
    path = here / "mine.yaml"
    path.write_text(yaml.safe_dump(made))
    return path


def trials(folder: Path) -> list[Any]:
    import optuna

    name = json.loads((folder / "search.json").read_text())["study"]
    return optuna.load_study(study_name=name, storage=f"sqlite:///{folder / 'search.db'}").trials


def stopped(here: Path, number: int, everyone: bool = False) -> subprocess.Popen[str]:
    """A search that gets a signal when one trial has ended and another is running. everyone: so do its processes."""
    command = [*COMMAND, "search", "mine.yaml", "--out", "s"]
    process = subprocess.Popen(command, cwd=here, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        folder = here / "s"
        until(lambda: ended(folder) and under_way(folder), "one trial's end and another's rounds")
        for each in [*psutil.Process(process.pid).children(recursive=True)] if everyone else []:
            with suppress(psutil.NoSuchProcess):
                each.send_signal(number)
        process.send_signal(number)
        process.wait(300)
        return process
    finally:
        process.kill()


def seen(folder: Path) -> dict[int, tuple[Any, ...]]:
    """Number of a trial -> what Optuna has stored of it."""
    return {t.number: (t.state.name, t.params, t.values, t.intermediate_values) for t in trials(folder)}


def undisturbed(data: dict[str, Any], folder: Path) -> dict[int, tuple[Any, ...]]:
    """The trials of the same search, run one after the other in this process."""
    store = TrialStore(plan(data), storage_url("auto", folder), "undisturbed")
    while proposal := store.propose():
        rows = run(store.plan.experiment(proposal.params)).rows
        for row in rows:
            if "eval/excess" in row:
                store.report(proposal.number, int(row["round"]), row["eval/excess"])
        store.end(proposal.number, "finished", [rows[-1]["eval/excess"]], {})
    (folder / "search.json").write_text('{"study": "undisturbed"}')
    return seen(folder)


IN_SHARED_PROCESSES = {"sampler": "random", "concurrent": 4, "together": True}


@pytest.mark.timeout(1200)  # two Rays and two searches; a minute where nothing else runs
@pytest.mark.parametrize(
    "asked",
    [
        {"sampler": "tpe", "concurrent": 1},
        IN_SHARED_PROCESSES,
        pytest.param({"sampler": "random", "concurrent": 2}, marks=pytest.mark.slow),
    ],
)
def test_killed_and_gone_on_with_is_the_same_search(here: Path, ray_here: None, asked: dict[str, Any]):
    """The search has the same trials with the same values, to the bit, as an undisturbed one; trials that had ended are
    not run again; MLflow has every round once."""
    import ray

    address = None if "together" in asked else ray.get_runtime_context().gcs_address
    path = written(here, address, **asked)
    process = stopped(here, signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    done = ended(here / "s")
    before = {number: (here / "s" / "trials" / f"{number:04d}" / "result.json").read_text() for number in done}
    data = yaml.safe_load(path.read_text())
    found = search(data, here / "s", resume=True)
    assert [t.status for t in found.trials] == ["finished"] * 4
    assert seen(here / "s") == undisturbed({**data, "tracking": {"uri": "none"}}, here)
    for number, text in before.items():
        assert (here / "s" / "trials" / f"{number:04d}" / "result.json").read_text() == text, "it was run again"
    check_mlflow(here)


def check_mlflow(here: Path) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{here / 'mlflow.db'}")
    runs = client.search_runs([client.get_experiment_by_name("fedfleet").experiment_id])
    nested = [run for run in runs if "fedfleet.trial" in run.data.tags]
    assert len(runs) == 5
    assert sorted(run.data.tags["fedfleet.trial"] for run in nested) == ["0", "1", "2", "3"]
    assert {run.info.status for run in runs} == {"FINISHED"}
    for nest in nested:
        steps = [metric.step for metric in client.get_metric_history(nest.info.run_id, "train/loss")]
        assert sorted(steps) == list(range(1, ROUNDS + 1))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_asked_to_stop(here: Path, number: signal.Signals):
    """Ctrl-C, and the end of a job, which all processes are told: one sentence that says how to resume, and no process
    is left."""
    written(here, concurrent=1, trials=50, together=number == signal.SIGINT)
    process = stopped(here, number, everyone=number == signal.SIGTERM)
    output = process.stderr.read() if process.stderr else ""
    assert process.returncode == 128 + number, output
    assert "trials have ended; to go on: fedfleet search --resume" in output.splitlines()[-1]
    assert "Traceback" not in output
    left = [p for p in psutil.process_iter(["cmdline"]) if str(here) in " ".join(p.info["cmdline"] or [])]
    assert not left
    assert [t.state.name for t in trials(here / "s")][-1] == "RUNNING"
    assert os.path.isdir(here / "s" / "trials")

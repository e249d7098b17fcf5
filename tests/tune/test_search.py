"""Searches, in shared processes and on Ray: how trials end, what is found, and what Optuna and MLflow store."""

from __future__ import annotations

import json
import re
import sqlite3
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import fedfleet
from fedfleet.engine import run
from fedfleet.engine.config.schema import Tracking
from fedfleet.engine.errors import ConfigError, FedFleetError
from fedfleet.tune.files import load
from fedfleet.tune.search.folder import same
from fedfleet.tune.search.found import Found
from fedfleet.tune.search.observers import SearchTracker
from fedfleet.tune.search.optuna_storage import storage_url
from fedfleet.tune.search.plan import plan
from fedfleet.tune.search.run import search
from fedfleet.tune.search.trial_store import TrialStore

from .commands import invoke

pytestmark = pytest.mark.usefixtures("one_fork_server")

PLUGIN = '''
import os
from dataclasses import dataclass

from fedfleet.algorithms.parts.rules import Sgd


@dataclass(frozen=True)
class Touchy(Sgd):
    """Sgd that may fail."""

    does: str = "step"

    def step(self, y, v, state):
        if self.does == "raise":
            raise RuntimeError("touched")
        if self.does == "exit":
            os._exit(3)
        return super().step(y, v, state)


RULES = {"touchy": Touchy}
'''


def spec(rule: dict[str, Any], rounds: int = 9, **keys: Any) -> dict[str, Any]:
    """The experiment of a search over eight quadratics; a trial takes a fraction of a second when its process has
    started."""
    return {
        "name": "small",
        "workload": {"name": "quadratic", "dim": 4},
        "method": {"name": "fedavg", "rule": rule},
        "federation": {"clients": 8, "cohort": 4, "rounds": rounds, "local": {"steps": 2, "batch": 1}},
        "engine": {"backend": "local"},
        "evaluate": {"every": 1},
        "tracking": {"uri": "none"},
        **keys,
    }


GRID = {"search": "grid", "values": [0.3, 0.1, 0.03, 0.01]}
EXCESS = {"objectives": {"eval/excess": "min"}}


def study(found: Found) -> Any:
    """The search's study, opened by Optuna alone."""
    import optuna

    storage = f"sqlite:///{found.folder / 'search.db'}"
    (summary,) = optuna.get_all_study_summaries(storage=storage)
    return optuna.load_study(study_name=summary.study_name, storage=storage)


# --- what is found ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("together", ["auto", pytest.param(False, marks=pytest.mark.long)])
def test_a_grid_finds_its_best_point(here: Path, ray_here: None, together: Any):
    """Every trial's value is that of the same run without a search; the winner is a file that runs."""
    made = spec({"name": "sgd", "lr": GRID}, search={**EXCESS, "together": together})
    found = search(made, here / "s")
    plain = {}
    for lr in GRID["values"]:
        alone = spec({"name": "sgd", "lr": lr})
        plain[lr] = run(experiment_of(here, alone)).metrics["eval/excess"]
    assert {t.params["method.rule.lr"]: t.values[0] for t in found.trials} == plain
    assert found.value == min(plain.values())
    winner = load(str(here / "s" / "best.yaml"))
    assert winner.method["rule"]["lr"] == min(plain, key=lambda lr: plain[lr])
    assert run(winner).metrics["eval/excess"] == found.value
    trials = study(found).trials
    assert [t.state.name for t in trials] == ["COMPLETE"] * 4
    assert all(sorted(t.intermediate_values) == list(range(1, 10)) for t in trials)
    again = search(made, here / "s", resume=True)  # complete: nothing runs
    assert again.trials == found.trials
    check_what_python_gets(found, again)


def check_what_python_gets(found: Found, again: Found) -> None:
    """The trials and their records, Optuna's study and the table of the trials agree."""
    best = found.records(found.front[0].number)
    assert [record["round"] for record in best] == list(range(1, 10))
    assert best[-1]["eval/excess"] == found.value
    assert found.study.best_value == again.study.best_value == found.value
    table = again.to_pandas()
    assert table["eval/excess"].to_list() == [t.values[0] for t in found.trials]
    assert table["method.rule.lr"].to_list() == GRID["values"]
    assert table["rounds"].to_list() == [9] * 4


def test_the_command_as_a_function(here: Path, ray_here: None):
    """The program that `--python` prints does what the command line says."""
    (here / "small.yaml").write_text(yaml.safe_dump(spec({"name": "sgd", "lr": 0.3}, 3, search=EXCESS)))
    changes = ["method.rule.lr={search: grid, values: [0.3, 0.1]}", "search.concurrent=1"]
    done = invoke("search", "small.yaml", *changes, "--out", "mine", "--python")
    assert done.exit_code == 0, done.output
    assert not (here / "mine").exists()
    names: dict[str, Any] = {}
    exec(done.stdout, names)
    found = names["found"]
    assert isinstance(found, fedfleet.Found)
    assert {t.params["method.rule.lr"] for t in found.trials} == {0.3, 0.1}
    assert (here / "mine" / "best.yaml").is_file()
    again = fedfleet.search(found.folder, resume=True)
    assert again.trials == found.trials
    with pytest.raises(ConfigError, match="resume takes only the search's folder; leave out and paper_grid away"):
        fedfleet.search(found.folder, out="other", resume=True)
    with pytest.raises(ConfigError, match="already holds a search"):
        fedfleet.search(spec({"name": "sgd", "lr": GRID}, 3, search=EXCESS), out="mine")


def experiment_of(here: Path, data: dict[str, Any]) -> Any:
    path = here / "alone.yaml"
    path.write_text(yaml.safe_dump(data))
    return load(str(path))


@pytest.mark.parametrize("together", ["auto", pytest.param(False, marks=pytest.mark.long)])
def test_trials_that_fail_diverge_and_lag_behind(here: Path, ray_here: None, together: Any):
    """Six trials: one finishes, one diverges, one fails, the processes of one die twice (a process is replaced once),
    and two lag behind."""
    (here / "touchy.py").write_text(PLUGIN)
    points = [(0.3, "step"), (1e9, "step"), (0.1, "raise"), (0.1, "exit"), (1e-6, "step"), (1e-5, "step")]
    rules = [{"name": "touchy", "lr": lr, "does": does} for lr, does in points]
    asked = {**EXCESS, "pruner": "asha", "reduction": 3, "concurrent": 1, "together": together}
    made = spec({"search": "grid", "values": rules}, plugins=[str(here / "touchy.py")], search=asked)
    found = search(made, here / "s")
    assert [t.status for t in found.trials] == ["finished", "diverged", "failed", "failed", "pruned", "pruned"]
    assert found.best["method"]["rule"] == rules[0]
    assert [t.rounds for t in found.trials[4:]] == [1, 1]
    told = [t.reason for t in found.trials]
    assert "diverged in round" in told[1]
    assert "touched" in told[2]
    assert "process died" in told[3]
    trials = study(found).trials
    assert [t.state.name for t in trials] == ["COMPLETE", "PRUNED", "FAIL", "FAIL", "PRUNED", "PRUNED"]
    assert [len(t.intermediate_values) for t in trials] == [9, trials[1].last_step or 0, 0, 0, 1, 1]
    assert not list((here / "s").glob("trials/*/state")), "clients' states are left"
    assert [len(found.records(number)) for number in (0, 2, 3)] == [9, 0, 0]


def refusing(**keys: Any) -> dict[str, Any]:
    """A search over a grid of four points, of which (8 clients, a cohort of 16) is no experiment."""
    made = spec({"name": "sgd", "lr": 0.1}, 2, search={**EXCESS, "together": True}, **keys)
    made["federation"]["clients"] = {"search": "grid", "values": [8, 32]}
    made["federation"]["cohort"] = {"search": "grid", "values": [4, 16]}
    return made


def test_values_that_exclude_each_other_fail_their_trial(here: Path, capsys: pytest.CaptureFixture[str]):
    """Both ends of all ranges are valid, and the point between them is not: its trial fails, and the search goes on. It
    also goes on from a storage in which that trial is under way."""
    made = refusing()
    found = search(made, here / "s", progress=True)
    by_point = {tuple(t.params.values()): t for t in found.trials}
    refused = by_point.pop((8, 16))
    assert (refused.status, refused.rounds) == ("failed", 0)
    assert refused.reason.startswith("federation.cohort: cohort <= clients")
    assert [t.status for t in by_point.values()] == ["finished"] * 3
    assert f"trial {refused.number}: failed: federation.cohort: cohort" in capsys.readouterr().err
    assert search(made, here / "s", resume=True).trials == found.trials

    (here / "killed").mkdir()
    for name in ("search.yaml", "search.json"):
        (here / "killed" / name).write_text((here / "s" / name).read_text())
    kept = json.loads((here / "s" / "search.json").read_text())
    killed = TrialStore(plan(made), storage_url("auto", here / "killed"), kept["study"], kept["search_id"])
    while killed.propose() is not None:
        pass
    assert search(made, here / "killed", resume=True).trials == found.trials


@pytest.mark.long
def test_values_that_exclude_each_other_in_mlflow(here: Path):
    """The trial has a nested run with its values and the reason, and a resumed search leaves it as it is."""
    from mlflow import MlflowClient

    made = refusing(tracking={"uri": f"sqlite:///{here / 'mlflow.db'}"})
    for resume in (False, True):
        search(made, here / "s", resume=resume)
        client = MlflowClient(f"sqlite:///{here / 'mlflow.db'}")
        (place,) = [e.experiment_id for e in client.search_experiments() if e.name == "fedfleet"]
        (failed,) = client.search_runs([place], "tags.status = 'failed'")
        assert failed.info.status == "FAILED"
        assert failed.data.tags["reason"].startswith("federation.cohort: cohort <= clients")
        assert {key: failed.data.params[f"federation.{key}"] for key in ("clients", "cohort")} == {
            "clients": "8",
            "cohort": "16",
        }
        assert len(client.search_runs([place])) == 5


def test_a_search_over_seeds_says_that_it_chose_one(here: Path):
    range_of_seeds = {"search": "grid", "values": [0, 1]}
    data = spec({"name": "sgd", "lr": 0.1}, seed=range_of_seeds, search={**EXCESS, "concurrent": 1})
    (here / "seeds.yaml").write_text(yaml.safe_dump(data))
    done = invoke("search", "seeds.yaml", "--out", "found", "--quiet")
    assert done.exit_code == 0, done.output
    assert "note: the search also chose a seed" in done.stdout
    assert "the search also chose a seed" in (here / "found" / "report.html").read_text()


def test_asha_among_trials_that_share_processes(here: Path):
    """Eight trials, four at once: those that lag behind leave, and others take their places. The best one finishes with
    the value of the run alone, and no pruned trial goes on after its rung."""
    rates = [0.3, 1e-6, 1e-5, 1e-4, 0.1, 2e-6, 2e-5, 2e-4]
    asked = {**EXCESS, "pruner": "asha", "grace": 3, "concurrent": 4, "together": True}
    made = spec({"name": "sgd", "lr": {"search": "grid", "values": rates}}, 30, search=asked)
    found = search(made, here / "s")
    by_rate = {t.params["method.rule.lr"]: t for t in found.trials}
    assert len(by_rate) == 8
    assert by_rate[0.3].status == "finished"
    assert found.value == run(experiment_of(here, spec({"name": "sgd", "lr": 0.3}, 30))).metrics["eval/excess"]
    pruned = [t for t in found.trials if t.status == "pruned"]
    assert len(pruned) >= 3
    assert all(t.rounds in (3, 9, 27) for t in pruned)  # the rungs
    for trial in found.trials:
        log = (here / "s" / "trials" / f"{trial.number:04d}" / "run.log").read_text()
        rounds = [int(number) for number in re.findall(r"^\S+ round=(\d+)", log, re.MULTILINE)]
        assert rounds == list(range(1, trial.rounds + 1))


def test_several_objectives(here: Path, ray_here: None):
    """More local steps give better values, and more rounds more bytes: the Pareto front has the best points of both."""
    made = spec({"name": "sgd", "lr": 0.1}, search={"objectives": {"eval/excess": "min", "bytes": "min"}})
    made["federation"]["rounds"] = {"search": "grid", "values": [2, 12]}
    made["federation"]["local"]["steps"] = {"search": "grid", "values": [1, 5]}
    found = search(made, here / "s")
    assert [t.status for t in found.trials] == ["finished"] * 4
    front = {tuple(t.params.values()) for t in found.front}
    assert front == {(2, 5), (12, 5)}
    assert found.best["federation"]["rounds"] == 12
    sent = {t.params["federation.rounds"]: t.values[1] for t in found.trials}
    assert sent == {rounds: rounds * 4 * 2 * 4 * 4 for rounds in (2, 12)}  # 4 clients, down and up, 4 floats of 4 bytes
    assert {p.name for p in (here / "s" / "front").iterdir()} == {f"{t.number:04d}.yaml" for t in found.front}
    assert all(load(str(p)).federation.local.steps == 5 for p in (here / "s" / "front").iterdir())


def test_the_front_of_a_resumed_search_replaces_the_earlier_one(here: Path):
    """Two trials are on the front, and the third one of the resumed search surpasses the second. A file of the user
    stays."""
    points = [(2, 1), (12, 1), (12, 5)]  # more local steps give better values for the same bytes
    start = [{"federation.rounds": rounds, "federation.local.steps": steps} for rounds, steps in points]
    asked = {"objectives": {"eval/excess": "min", "bytes": "min"}, "sampler": "random", "start": start}
    made = spec({"name": "sgd", "lr": 0.1}, search={**asked, "trials": 2})
    made["federation"]["rounds"] = {"search": "choice", "values": [2, 12]}
    made["federation"]["local"]["steps"] = {"search": "choice", "values": [1, 5]}
    front = here / "s" / "front"
    search(made, here / "s")
    assert {path.name for path in front.iterdir()} == {"0000.yaml", "0001.yaml"}
    (front / "mine.yaml").write_text("name: mine")
    made["search"]["trials"] = 3
    search(made, here / "s", resume=True)
    assert {path.name for path in front.iterdir()} == {"0000.yaml", "0002.yaml", "mine.yaml"}


def test_an_objective_that_is_not_there_is_refused_before_the_search_begins(here: Path):
    made = spec({"name": "sgd", "lr": GRID}, search={"objectives": {"eval/exces": "min"}, "concurrent": 1})
    refused = r"search\.objectives: no run will record eval/exces; did you mean eval/excess\? valid: bytes, seconds, "
    with pytest.raises(ConfigError, match=refused):
        search(made, here / "s")
    assert not (here / "s").exists()


def test_where_no_trial_finishes(here: Path, ray_here: None):
    made = spec({"name": "sgd", "lr": {"search": "grid", "values": [1e9, 1e10]}}, search=EXCESS)
    with pytest.raises(FedFleetError, match="none of 2 trials finished; trial 0: diverged in round"):
        search(made, here / "s")


def test_another_search_is_not_gone_on_with(here: Path, ray_here: None):
    made = spec({"name": "sgd", "lr": {"search": "grid", "values": [0.1]}}, search=EXCESS)
    search(made, here / "s")
    with pytest.raises(ConfigError, match="already holds a search"):
        search(made, here / "s")
    other = spec({"name": "sgd", "lr": GRID}, search={**EXCESS, "last": 2})
    with pytest.raises(ConfigError, match=r"differs in method\.rule\.lr\.values, search\.last"):
        search(other, here / "s", resume=True)


def test_two_searches_do_not_share_a_study(here: Path):
    """The second one leaves no file behind. The first one is resumed, also if it began when studies bore no id."""
    shared = {"storage": f"sqlite:///{here / 'shared.db'}", "study": "lr"}
    made = spec({"name": "sgd", "lr": {"search": "grid", "values": [0.3, 0.1]}}, 2, search={**EXCESS, **shared})
    found = search(made, here / "first")
    with pytest.raises(ConfigError, match="already has a study lr of another search"):
        search(made, here / "second")
    assert not (here / "second" / "search.json").exists()
    assert search(made, here / "first", resume=True).trials == found.trials

    import optuna

    old = {"search_id": found.search_id, "study": "old"}
    (here / "first" / "search.json").write_text(json.dumps(old))
    optuna.copy_study(
        from_study_name="lr", from_storage=shared["storage"], to_storage=shared["storage"], to_study_name="old"
    )
    study_id = optuna.load_study(study_name="old", storage=shared["storage"])._study_id
    with sqlite3.connect(here / "shared.db") as database:
        database.execute("DELETE FROM study_user_attributes WHERE study_id = ?", (study_id,))
    assert search(made, here / "first", resume=True).trials == found.trials


def test_passwords_stay_in_one_file_that_others_cannot_read(here: Path):
    """MLflow's server is not there, which costs a warning."""
    secret = "s3cret"
    made = spec({"name": "sgd", "lr": {"search": "grid", "values": [0.3, 0.1]}}, 2, search=EXCESS)
    made["tracking"] = {"uri": f"http://me:{secret}@127.0.0.1:1/"}
    search(made, here / "s")
    holding = [path for path in (here / "s").rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]
    assert holding == [here / "s" / "search.yaml"]
    assert stat.S_IMODE(holding[0].stat().st_mode) == 0o600
    assert load(str(here / "s" / "best.yaml")).tracking.uri == "http://***@127.0.0.1:1/"
    made["tracking"] = {"uri": "none"}
    search(made, here / "open")
    assert stat.S_IMODE((here / "open" / "search.yaml").stat().st_mode) & 0o044 == 0o044


def test_mlflow_gets_no_passwords(here: Path):
    database = "postgresql://me:s3cret@db/x"
    asked = {**EXCESS, "storage": database, "warm_start": [f"{database}#lr"], "sampler": "tpe"}
    made = spec({"name": "sgd", "lr": {"search": "loguniform", "low": 0.1, "high": 1.0}}, search=asked)
    wanted = plan({**made, "tracking": {"uri": "http://me:s3cret@127.0.0.1:1/"}})
    tracker = SearchTracker(wanted, Tracking(uri="http://me:s3cret@127.0.0.1:1/"), here, "id")
    for writer in tracker.writers:
        writer.abandon()
    (text,) = tracker.settings().values()
    assert yaml.safe_load(text)["search"]["storage"] == "postgresql://***@db/x"
    assert yaml.safe_load(text)["tracking"]["uri"] == "http://***@127.0.0.1:1/"
    parameters = tracker.header().parameters
    assert parameters["search"]["warm_start"] == ["postgresql://***@db/x#lr"]
    assert "s3cret" not in f"{text}{parameters}"


@pytest.mark.parametrize(
    ("change", "differs"),
    [
        ({"engine": {"backend": "local", "dtype": "float64"}}, "engine.dtype"),
        ({"engine": {"backend": "local", "kernels": "native", "block": 1}}, "engine.block, engine.kernels"),
        ({"attack": {"name": "ipm", "share": 0.2}}, "attack.name, attack.share"),
        ({"seed": 1}, "seed"),
        ({"seed": 0, "evaluate": {"every": 1, "batch": 500}, "plugins": [], "checkpoint": {"keep": 3}}, ""),
        ({"evaluate": {"every": 1, "batch": 400}}, "evaluate.batch"),
        ({"engine": {"backend": "ray", "workers": 2, "dtype": "float32", "store": "elsewhere"}}, ""),
        ({"name": "other", "tracking": {"uri": "none", "experiment": "x"}, "attack": None}, ""),
    ],
)
def test_what_may_change_when_a_search_is_resumed(here: Path, change: dict[str, Any], differs: str):
    """A change is refused in both directions: a setting that was added, and the same setting taken away."""
    made = spec({"name": "sgd", "lr": GRID}, search=EXCESS)
    plans = plan(made), plan({**made, **change})
    for kept, wanted in (plans, plans[::-1]):
        if differs:
            with pytest.raises(ConfigError, match=f"differs in {re.escape(differs)}; undo"):
                same(kept, wanted, here)
        else:
            same(kept, wanted, here)


# --- MLflow -----------------------------------------------------------------------------------------------------------
@pytest.mark.long
def test_eight_at_once_in_mlflow(here: Path, ray_here: None):
    """Eight trials in eight processes at the same time: every round of each is in one SQLite file, in a nested run, and
    there is no error about a lock."""
    from mlflow import MlflowClient

    lrs = [0.3, 0.2, 0.1, 0.05, 0.03, 0.02, 0.01, 0.005]
    made = spec({"name": "sgd", "lr": {"search": "grid", "values": lrs}}, 40, search={**EXCESS, "concurrent": 8})
    made["engine"]["cpus"] = 0.25
    made["tracking"] = {"uri": f"sqlite:///{here / 'mlflow.db'}"}
    found = search(made, here / "s")
    assert [t.status for t in found.trials] == ["finished"] * 8
    client = MlflowClient(f"sqlite:///{here / 'mlflow.db'}")
    runs = client.search_runs([client.get_experiment_by_name("fedfleet").experiment_id])
    (parent,) = [r for r in runs if r.data.tags.get("kind") == "search"]
    nested = sorted((r for r in runs if r is not parent), key=lambda r: int(r.data.tags["fedfleet.trial"]))
    assert [r.data.params["method.rule.lr"] for r in nested] == [str(lr) for lr in lrs]
    assert {r.data.tags["mlflow.parentRunId"] for r in nested} == {parent.info.run_id}
    assert {r.info.status for r in runs} == {"FINISHED"}
    for trial, nest in zip(found.trials, nested, strict=True):
        history = client.get_metric_history(nest.info.run_id, "eval/excess")
        assert sorted(m.step for m in history) == list(range(1, 41))
        assert nest.data.metrics["eval/excess"] == trial.values[0]
        told = {"method": "fedavg", "workload": "quadratic", "seed": "0", "status": "finished"}
        assert told.items() <= nest.data.tags.items()
        assert "rounds.parquet" in {item.path for item in client.list_artifacts(nest.info.run_id)}
    assert {"best.yaml", "report.html"} <= {item.path for item in client.list_artifacts(parent.info.run_id)}
    assert "artifacts/report.html" in parent.data.tags["mlflow.note.content"]


# --- processors -------------------------------------------------------------------------------------------------------
TWO_CORES = """
import json, os, sys
import ray
from fedfleet.tune.search.run import search

os.environ["RAY_worker_niceness"] = "0"  # as in the command; Ray's default of 15 starves workers

ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=256 * 2**20)
print(json.dumps(search(json.loads(sys.argv[1]), "s").summary()))
"""


@pytest.mark.long
def test_workers_of_trials_cannot_wait_for_each_other(here: Path):
    """There are two processors and four simultaneous trials, each with two workers of one processor. If a trial did not
    reserve its workers together with itself, two trials would get one worker each and wait for ever."""
    asked = {**EXCESS, "workers": 2, "concurrent": 4}
    made = spec({"name": "sgd", "lr": {"search": "grid", "values": [0.3, 0.1]}}, 3, search=asked)
    command = [sys.executable, "-c", TWO_CORES, json.dumps(made)]
    done = subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["finished"] == 2
    alone = run(experiment_of(here, spec({"name": "sgd", "lr": 0.3}, 3))).metrics["eval/excess"]
    assert alone in summary["front"][0]["values"] or summary["best"]["params"] != {"method.rule.lr": 0.3}


def test_a_trial_that_could_never_be_placed(here: Path, ray_here: None):
    made = spec({"name": "sgd", "lr": GRID}, search={**EXCESS, "workers": 50})
    with pytest.raises(ConfigError, match=r"search\.workers: a trial does not fit: .*50 x 1"):
        search(made, here / "s")

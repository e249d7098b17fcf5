"""Tracking, read back through MLflow's own API."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import socketserver
import sqlite3
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from urllib.parse import unquote, urlsplit

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml

from fedfleet.engine import Experiment
from fedfleet.engine.api import run as start
from fedfleet.engine.config.registry import find_plugin
from fedfleet.engine.errors import ConfigError, Interrupted
from fedfleet.engine.run_spec import RunSpec
from fedfleet.engine.runs.prepare import prepare
from fedfleet.tune.files import load
from fedfleet.tune.tracking import mlflow_process, stores
from fedfleet.tune.tracking.mlflow_process import MlflowProcess
from fedfleet.tune.tracking.mlflow_writer import MlflowWriter, flatten, table_of_clients
from fedfleet.tune.tracking.model import Predictor, example, model_of, with_network
from fedfleet.tune.tracking.origin import origin
from fedfleet.tune.tracking.run import MlflowTracker
from fedfleet.tune.tracking.stores import KIND, PATIENCE, open_store, store
from fedfleet.tune.tracking.writer import TOP, End, RunHeader
from fedfleet.workloads.data.digits import Digits
from fedfleet.workloads.problems.auc import Auc

from ..faults.runs import Watch, interrupt
from .commands import COMMAND, invoke, kill, shell, until

RUN = ("run", "digits", "engine.backend=local", "federation.rounds=7", "seed=4", "--json", "--quiet", "--out", "mine")
SECRET = "hunter2"


pytestmark = pytest.mark.usefixtures("here")


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLflow's settings are afterwards as they were before."""
    for name in PATIENCE:
        monkeypatch.setenv(name, os.environ.get(name) or PATIENCE[name])


def only_run(uri: str, experiment: str = "fedfleet") -> tuple[Any, Any]:
    """(client, run) of a store with one run."""
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    found = client.get_experiment_by_name(experiment)
    assert found is not None
    (run,) = client.search_runs([found.experiment_id])
    return client, run


def artifacts(client: Any, run: Any, folder: Path) -> dict[str, bytes]:
    files = [item.path for item in client.list_artifacts(run.info.run_id)]
    folder.mkdir()
    return {path: Path(client.download_artifacts(run.info.run_id, path, str(folder))).read_bytes() for path in files}


def check_complete(uri: str, result: dict[str, Any], here: Path) -> None:
    """Check that the store has everything about a run of RUN."""
    client, run = only_run(uri)
    assert run.info.status == "FINISHED"
    assert 0 < run.info.start_time <= run.info.end_time
    params = run.data.params
    assert params["method.name"] == "scaffold"
    assert params["method.rule.lr"] == "0.1"
    assert params["workload.partition.beta"] == "0.1"
    assert params["federation.local.steps"] == "5"
    assert params["seed"] == "4"
    told = {"method": "scaffold", "workload": "digits", "partition": "dirichlet", "seed": "4", "status": "finished"}
    assert told.items() <= run.data.tags.items()
    assert run.data.tags["fedfleet.run_id"] == result["run_id"]
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert sorted(metric.step for metric in history) == [1, 2, 3, 4, 5, 6, 7]
    evaluated = client.get_metric_history(run.info.run_id, "eval/accuracy")
    assert sorted(metric.step for metric in evaluated) == [5, 7]
    assert {name: run.data.metrics[name] for name in result["metrics"]} == pytest.approx(result["metrics"])
    stored = artifacts(client, run, here / "downloaded")
    assert stored["config.yaml"] == (here / "mine" / "config.yaml").read_bytes()
    assert stored["rounds.parquet"] == (here / "mine" / "rounds.parquet").read_bytes()
    assert b"round=7" in stored["run.log"]
    assert b"train/loss" in stored["report.html"]
    accuracy, loss = (result["metrics"][f"eval/{name}"] for name in ("accuracy", "loss"))
    place = f"#/experiments/{run.info.experiment_id}/runs/{run.info.run_id}/artifacts/report.html"
    assert run.data.tags["mlflow.note.content"] == (
        f"**eval/accuracy {accuracy:.4f}, eval/loss {loss:.4f}**\n\n"
        f"[Report with charts and tables]({place}?workflowType=machine_learning)"
    )
    (used,) = run.inputs.dataset_inputs
    profile, dealt = json.loads(used.dataset.profile), json.loads((here / "mine" / "partition.json").read_text())
    assert (used.dataset.name, used.tags[0].value) == ("digits", "training")
    assert profile == {"num_rows": 1442, "clients": 100, "seed": 4, "partition_sha256": dealt["sha256"]}
    for name in ("label_entropy", "total_variation"):
        assert float(params[f"heterogeneity.{name}.mean"]) == dealt["heterogeneity"][name]["mean"] > 0
    assert client.get_experiment(run.info.experiment_id).tags == KIND


def test_a_run_without_a_folder_says_how_different_its_clients_are(here: Path):
    uri = f"sqlite:///{here / 'mlflow.db'}"
    asked = load("digits", ["federation.rounds=2", "engine.backend=local", f"tracking.uri={uri}"])
    start(asked)
    _, run = only_run(uri)
    assert 0 < float(run.data.params["heterogeneity.total_variation.mean"]) < 1


# --- SQLite -----------------------------------------------------------------------------------------------------------
def test_a_run_in_sqlite(here: Path):
    done = invoke(*RUN)
    assert done.exit_code == 0, done.output
    assert done.stderr == ""
    check_complete(f"sqlite:///{here / 'mlflow.db'}", json.loads(done.stdout.splitlines()[-1]), here)
    assert {path.name for path in here.iterdir()} == {"mine", "mlflow.db", "mlartifacts", "downloaded"}


OWN = ("personal.tensors=head", "evaluate.held_out=0.2", "federation.clients=12", "federation.cohort=5")


def test_the_table_of_clients_is_shown(here: Path):
    """MLflow reads it as one of its tables. The description of the run has accuracies, and no count."""
    uri = f"sqlite:///{here / 'mlflow.db'}"
    done = invoke("run", "digits", "engine.backend=local", "federation.rounds=1", *OWN, "--out", "mine")
    assert done.exit_code == 0, done.output
    client, run = only_run(uri)
    stored = artifacts(client, run, here / "downloaded")
    assert stored["clients.parquet"] == (here / "mine" / "clients.parquet").read_bytes()
    shown = client.load_table(run.info.experiment_id, "clients.json")
    expected = pq.read_table("mine/clients.parquet")
    assert list(shown.columns) == expected.column_names
    for name in ("client", "visits", "own_test_loss"):
        assert shown[name].tolist() == pytest.approx(expected[name].to_pylist(), rel=1e-12)  # as pandas reads numbers
    assert run.data.tags["mlflow.note.content"].startswith("**eval/own/test_accuracy ")


def test_a_table_of_very_many_clients_is_cut_and_its_name_says_so(here: Path):
    pq.write_table(
        pa.table({"client": range(2001), "own_test_loss": [math.nan, None, *[0.5] * 1999]}), "clients.parquet"
    )
    ((name, text),) = table_of_clients(here).items()
    assert name == "clients-first-2000-of-2001.json"
    table = json.loads(text)
    assert table["columns"] == ["client", "own_test_loss"]
    assert (len(table["data"]), table["data"][:3]) == (2000, [[0, None], [1, None], [2, 0.5]])
    (here / "clients.parquet").write_bytes(b"damaged")
    assert table_of_clients(here) == {}


UNIMPORTED = """
import atexit, sys
atexit.register(lambda: print("mlflow" in sys.modules, file=sys.stderr))
from fedfleet.tune.main import main
main()
"""


@pytest.mark.long
def test_a_command_writes_in_a_process_of_its_own(here: Path):
    done = subprocess.run([sys.executable, "-c", UNIMPORTED, *RUN], cwd=here, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "False\n")
    check_complete(f"sqlite:///{here / 'mlflow.db'}", json.loads(done.stdout.splitlines()[-1]), here)


def test_a_process_that_ends_costs_a_warning(here: Path, capsys: pytest.CaptureFixture[str]):
    process = MlflowProcess()
    process.open("run", uri=store("auto"), experiment="fedfleet", folder=None)
    process.begin(TOP, lambda: RunHeader("mine", {}))
    process.popen.kill()
    process.popen.wait()
    process.rounds(TOP, [{"round": 1, "train/loss": 2.0}])
    process.end(End(TOP, "finished"))
    process.close()
    told = "the process that writes has ended with status -9; the run itself continues"
    assert capsys.readouterr().err == f"warning: not tracked in MLflow: {told}\n"


def test_a_process_that_is_not_needed_ends(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(sys.modules, "mlflow", raising=False)
    with mlflow_process.beside(load("digits").tracking):
        begun = mlflow_process._begun
        assert begun is not None
        assert begun.popen.poll() is None
    assert begun.popen.poll() is not None
    with mlflow_process.beside(load("digits", ["tracking=csv"]).tracking):
        assert mlflow_process.taken() is None


def test_a_new_store_is_a_copy_of_an_empty_one(here: Path, monkeypatch: pytest.MonkeyPatch):
    """MLflow makes its tables once; later stores are copies of the empty one in the cache, unless that is damaged."""
    monkeypatch.setenv("FEDFLEET_CACHE", str(here / "cache"))
    made = []
    create = stores.create_tables
    monkeypatch.setattr(stores, "create_tables", lambda file: (made.append(file), create(file)))
    for name in ("a", "b", "c"):
        (here / name).mkdir()
        if name == "c":
            stores.empty_store().write_bytes(b"damaged")
        client, place = open_store(f"sqlite:///{here / name / 'mlflow.db'}", "mine")
        client.create_run(place)
        assert [found.name for found in client.search_experiments()] == ["mine", "Default"]
        assert client.get_experiment(place).artifact_location == (here / name / "mlartifacts/mine").as_uri()
    assert [file.parent.name for file in made] == ["a", "c"]


def commit_here(folder: Path) -> str:
    """The commit of a new repository in a folder."""
    git = ("git", "-c", "user.name=me", "-c", "user.email=me@example.org")
    for command in (("init", "-q"), ("commit", "-q", "--allow-empty", "-m", folder.name)):
        subprocess.run([*git, *command], cwd=folder, check=True)
    found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, check=True)
    return found.stdout.strip()


def test_the_commit_is_the_users(here: Path):
    """The commit is that of the folder with the plug-in, else of the current folder, else there is none; it is never
    the commit of this package."""
    for name in ("outside", "work", "plugin"):
        (here / name).mkdir()
    work, plugin = commit_here(here / "work"), commit_here(here / "plugin")
    subprocess.run(["git", "remote", "add", "origin", f"https://bob:{SECRET}@h/x.git"], cwd=here / "work", check=True)
    (here / "plugin" / "mine.py").write_text("METHODS = {}\n")
    for folder, plugins, commit in (
        ("outside", (), None),
        ("work", (), work),
        ("outside", (find_plugin(str(here / "plugin" / "mine.py")),), plugin),
    ):
        os.chdir(here / folder)
        tags = origin(plugins)
        assert (tags.get("commit"), tags.get("mlflow.source.git.commit")) == (commit, commit)
        assert tags.get("mlflow.source.git.repoURL") == ("https://***@h/x.git" if commit == work else None)
        assert tags["mlflow.user"]


def test_the_tensors_of_the_model_are_logged(here: Path):
    """By default the logged model is the file of the run's folder."""
    assert invoke(*RUN).exit_code == 0
    client, run = only_run(store("auto"))
    (made,) = run.outputs.model_outputs
    logged = client.get_logged_model(made.model_id)
    folder = Path(unquote(urlsplit(logged.artifact_location).path))
    assert (logged.status, {file.name for file in folder.iterdir()}) == ("READY", {"MLmodel", "model.safetensors"})
    assert (folder / "model.safetensors").read_bytes() == (here / "mine" / "model.safetensors").read_bytes()


def test_the_graph_of_the_model_is_logged_and_can_be_loaded(here: Path, monkeypatch: pytest.MonkeyPatch):
    """MLflow's own function, which refuses pickles by default, loads it. The logits are those of the run's model, also
    for another number of rows than the example has."""
    done = invoke(*RUN, "tracking.model=graph", "workload.model={name: mlp, hidden: [8]}")
    assert (done.exit_code, done.stderr) == (0, "")
    uri = f"sqlite:///{here / 'mlflow.db'}"
    client, run = only_run(uri)
    (made,) = run.outputs.model_outputs
    assert client.get_logged_model(made.model_id).status == "READY"
    from mlflow import get_tracking_uri, set_tracking_uri
    from mlflow.models import get_model_info
    from mlflow.pytorch import load_model

    before = get_tracking_uri()
    set_tracking_uri(uri)
    try:
        network = load_model(f"runs:/{run.info.run_id}/model")
        info = get_model_info(f"models:/{made.model_id}")
    finally:
        set_tracking_uri(before)
    assert [one.shape for one in info.signature.inputs.inputs] == [(-1, 1, 8, 8)]
    assert [one.shape for one in info.signature.outputs.inputs] == [(-1, 10)]
    assert info.saved_input_example_info["type"] == "ndarray"
    test = Digits().load()[1]
    logits = network(torch.from_numpy(test["input"])).detach().numpy()
    accuracy = float((logits.argmax(1) == test["label"]).mean())
    assert accuracy == pytest.approx(run.data.metrics["eval/accuracy"], abs=1e-6)
    assert not list(here.rglob("*.pkl")) + list(here.rglob("*.pth"))


def test_a_model_that_cannot_be_exported_costs_a_warning(here: Path, capsys: pytest.CaptureFixture[str]):
    def export(folder: Path) -> Any:
        raise RuntimeError("Could not guard on data-dependent expression\nand many more lines")

    writer = MlflowWriter(store("auto"), "fedfleet", None, "run")
    writer.begin(TOP, lambda: RunHeader("mine", {}))
    writer.rounds(TOP, [{"round": 1, "train/loss": 1.0}])
    writer.end(End(TOP, "finished", model=export))
    writer.close()
    told = "warning: the model is not logged in MLflow: Could not guard on data-dependent expression; the run itself"
    assert capsys.readouterr().err.startswith(told)
    _, run = only_run(store("auto"))
    assert (run.info.status, run.outputs.model_outputs) == ("FINISHED", [])


DIGITS = {"name": "digits"}


@pytest.mark.parametrize(
    ("workload", "inner"),
    [
        ("quadratic", None),
        ({"name": "auc", "of": DIGITS}, Auc),
        ({"name": "regularised", "decay": 0.1, "of": DIGITS}, Digits),
    ],
)
def test_what_has_a_network_has_a_graph(workload: Any, inner: type | None):
    """The graph of a min-max problem is that of the classification in it; a quadratic has none."""
    federation, tracking = {"clients": 4, "cohort": 2, "rounds": 2}, {"model": "graph"}
    made = {"workload": workload, "method": "fedavg", "federation": federation, "tracking": tracking}
    run_spec = RunSpec.of("x", Experiment.model_validate(made))
    found = with_network(run_spec.workload)
    assert (model_of(run_spec, dict) is None) == (inner is None)
    if inner is None:
        assert found is None
        return
    assert isinstance(found, inner)
    assert found is not None
    x, inputs = run_spec.initial_model(), Digits().load()[1]["input"][:2]
    tensors = {name: x[name] for name in x.layout.names}
    logits = Predictor(found, tensors).eval()(torch.from_numpy(inputs))
    assert torch.equal(logits, found.logits(tensors, {"input": torch.from_numpy(inputs)}))
    assert (example(found) == inputs).all()


def test_the_experiments_kind(here: Path):
    """The experiment's kind opens MLflow's page of training runs; an experiment to which a user has given another kind
    keeps it."""
    from mlflow import MlflowClient

    client, _ = open_store(store("auto"), "new")
    client.create_experiment("old")
    client.create_experiment("theirs", tags={"mlflow.experimentKind": "genai_development"})
    for name in ("old", "theirs"):
        open_store(store("auto"), name)
    kinds = {e.name: e.tags.get("mlflow.experimentKind") for e in MlflowClient(store("auto")).search_experiments()}
    wanted = KIND["mlflow.experimentKind"]
    assert kinds == {"Default": None, "new": wanted, "old": wanted, "theirs": "genai_development"}


def test_a_store_of_files_where_it_is_allowed(here: Path, monkeypatch: pytest.MonkeyPatch):
    """MLflow has deprecated this store, but has an environment variable that allows it."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = (here / "runs").as_uri()
    done = invoke(*RUN, f"tracking.uri={uri}")
    assert (done.exit_code, done.stderr) == (0, "")
    check_complete(uri, json.loads(done.stdout.splitlines()[-1]), here)


def test_the_load_of_the_machine(here: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.1")
    made = load("digits", ["tracking.system=true"])
    tracker = MlflowTracker()
    tracker.begin(prepare(made, "load"))
    tracker.record({"round": 1, "train/loss": 1.0})

    def measured() -> bool:
        if not (here / "mlflow.db").is_file():
            return False
        with sqlite3.connect(here / "mlflow.db") as database:
            return bool(database.execute("select 1 from latest_metrics where key like 'system/cpu%'").fetchall())

    until(measured, "the load of the processors")
    tracker._close("finished")
    _, run = only_run(store("auto"))
    assert run.info.status == "FINISHED"
    assert 0 <= run.data.metrics["system/system_memory_usage_percentage"] <= 100
    assert "SystemMetricsMonitor" not in {thread.name for thread in threading.enumerate()}


def test_the_load_needs_a_package(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fedfleet.tune.tracking.mlflow_writer.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"tracking\.system needs the package psutil, got none; pip install psutil"):
        MlflowWriter("sqlite:///mlflow.db", "fedfleet", None, "run", system=True)


def test_a_relative_path_and_an_experiment_of_any_name(here: Path):
    (here / "deep").mkdir()
    done = invoke(*RUN, "tracking.uri=sqlite:///deep/runs.db", "tracking.experiment=../a b/c")
    assert (done.exit_code, done.stderr) == (0, "")
    client, run = only_run("sqlite:///deep/runs.db", "../a b/c")
    assert "rounds.parquet" in artifacts(client, run, here / "downloaded")
    assert {path.name for path in (here / "deep").iterdir()} == {"runs.db", "mlartifacts"}


def test_a_run_that_diverges_is_failed(here: Path):
    done = invoke(*RUN, "method.rule.lr=1e30")
    assert done.exit_code == 1
    _, run = only_run(f"sqlite:///{here / 'mlflow.db'}")
    assert run.info.status == "FAILED"
    assert run.data.tags["status"] == "diverged"


@pytest.mark.long
def test_two_runs_at_once_into_a_fresh_file(here: Path):
    args = [*COMMAND, *(word for word in RUN if word not in ("--out", "mine")), "tracking.uri=sqlite:///both.db"]
    both = [
        subprocess.Popen([*args, f"seed={seed}"], cwd=here, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for seed in (1, 2)
    ]
    for process in both:
        _, stderr = process.communicate(timeout=300)
        assert (process.returncode, stderr) == (0, "")
    from mlflow import MlflowClient

    client = MlflowClient("sqlite:///both.db")
    runs = client.search_runs([e.experiment_id for e in client.search_experiments()])
    assert sorted((run.data.params["seed"], run.info.status) for run in runs) == [("1", "FINISHED"), ("2", "FINISHED")]
    for run in runs:
        assert len(client.get_metric_history(run.info.run_id, "train/loss")) == 7


def test_a_file_that_is_no_database_costs_a_warning(here: Path):
    (here / "notes.db").write_text("these are notes, not a database\n" * 100)
    done = invoke(*RUN, "tracking.uri=sqlite:///notes.db")
    assert done.exit_code == 0
    assert json.loads(done.stdout.splitlines()[-1])["rounds"] == 7
    (line,) = done.stderr.splitlines()
    assert line.startswith("warning: not tracked in MLflow: ")


# --- servers ----------------------------------------------------------------------------------------------------------
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def mute() -> Iterator[tuple[str, list[int]]]:
    """The address of a server that closes every connection without an answer, and a list of the connections."""
    connections = []

    class Close(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            connections.append(self.client_address[1])

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Close) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"127.0.0.1:{server.server_address[1]}", connections
        server.shutdown()
        thread.join()


@pytest.mark.long
def test_a_server_that_does_not_answer_costs_a_warning_and_few_tries(
    mute: tuple[str, list[int]], here: Path, monkeypatch: pytest.MonkeyPatch
):
    """MLflow by itself tries eight times, and waits for minutes in between."""
    for name in PATIENCE:
        monkeypatch.delenv(name)
    address, connections = mute
    done = shell(here, *RUN, f"tracking.uri=http://bob:{SECRET}@{address}")
    assert 1 <= len(connections) <= 4
    assert done.returncode == 0
    assert json.loads(done.stdout.splitlines()[-1])["rounds"] == 7
    (line,) = done.stderr.splitlines()
    assert line.startswith("warning: not tracked in MLflow: ")
    assert line.endswith("; the run itself continues")
    assert SECRET not in done.stdout + done.stderr
    assert not [path for path in here.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
    assert {path.name for path in here.iterdir()} == {"mine"}


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a real `mlflow server`."""
    folder, port = tmp_path_factory.mktemp("server"), free_port()
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    stores = ["--backend-store-uri", f"sqlite:///{folder}/server.db", "--artifacts-destination", str(folder / "files")]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([*command, *stores], cwd=folder, stdout=log, stderr=log, start_new_session=True)
    address = f"http://127.0.0.1:{port}"

    def healthy() -> bool:
        assert process.poll() is None, (folder / "log").read_text()
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=1) as answer:
                return answer.status == 200
        except OSError:
            return False

    try:
        until(healthy, "the server's health")
        yield address
    finally:
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        kill(family)


@pytest.mark.long
def test_a_run_on_a_server(server: str, here: Path):
    """The address has a password, which the server does not need and which must not be written anywhere."""
    address = server.replace("//", f"//bob:{SECRET}@")
    done = invoke(*RUN, f"tracking.uri={address}")
    assert done.exit_code == 0, done.output
    assert done.stderr == ""
    assert len(done.stdout.splitlines()) == 1
    check_complete(server, json.loads(done.stdout), here)
    client, run = only_run(server)
    assert SECRET not in str(run.to_dictionary())
    assert not [path for path in here.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
    assert "***@127.0.0.1" in (here / "mine" / "config.yaml").read_text()
    assert not [value for value in client.get_run(run.info.run_id).data.params if value.startswith("tracking")]


# --- a store that fails for a while -----------------------------------------------------------------------------------
class Flaky:
    """A client whose first calls to write metrics fail."""

    failures = calls = 0
    steps: ClassVar[list[int]] = []
    ended: ClassVar[list[tuple[str, str]]] = []

    def create_run(self, *args: Any, **keys: Any) -> Any:
        return SimpleNamespace(info=SimpleNamespace(run_id="run"), data=SimpleNamespace(params={}))

    def log_batch(self, run_id: str, metrics: Any) -> None:
        Flaky.calls += 1
        if Flaky.calls <= self.failures:
            raise OSError("the server is being restarted")
        self.steps.extend(metric.step for metric in metrics)

    def set_tag(self, *args: Any) -> None: ...

    def set_terminated(self, run_id: str, status: str) -> None:
        self.ended.append((run_id, status))


def flaky(monkeypatch: pytest.MonkeyPatch, failures: int) -> None:
    Flaky.failures, Flaky.calls = failures, 0
    Flaky.steps.clear()
    Flaky.ended.clear()
    monkeypatch.setattr("fedfleet.tune.tracking.writer.FLUSH_SECONDS", 0.0)
    monkeypatch.setattr("fedfleet.tune.tracking.mlflow_writer.open_store", lambda uri, experiment: (Flaky(), "0"))


def tried(calls: int) -> None:
    """Wait until the writer has tried that often, each time with all that it has."""
    until(lambda: Flaky.calls >= calls, f"{calls} calls")


def test_what_was_missed_comes_with_the_next_batch(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    flaky(monkeypatch, failures=2)
    writer = MlflowWriter("sqlite:///unused.db", "fedfleet", None, "run")
    writer.begin(TOP, lambda: RunHeader("mine", {}))
    for round in (1, 2, 3, 4):
        writer.rounds(TOP, [{"round": round, "train/loss": 1.0}])
        tried(round)
    writer.end(End(TOP, "finished"))
    writer.close()
    assert Flaky.steps == [1, 2, 3, 4]
    assert Flaky.ended == [("run", "FINISHED")]
    assert capsys.readouterr().err == ""


def test_a_store_that_fails_to_the_end_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    flaky(monkeypatch, failures=100)
    writer = MlflowWriter("sqlite:///unused.db", "fedfleet", None, "run")
    writer.begin(TOP, lambda: RunHeader("mine", {}))
    writer.rounds(TOP, [{"round": 1, "train/loss": 1.0}])
    writer.end(End(TOP, "finished"))
    writer.close()
    assert "warning: not tracked in MLflow: the server is being restarted" in capsys.readouterr().err


# --- names ------------------------------------------------------------------------------------------------------------
def test_names_that_mlflow_refuses(capsys: pytest.CaptureFixture[str]):
    """Characters that it does not allow become _, different names stay different, and nothing else is lost."""
    odd = {"top-5 (%), α": 1.0, "a%": 2.0, "a_": 3.0, "a&": 4.0, "/b": 5.0, "c/../d": 6.0, "é" * 300: 7.0}
    writer = MlflowWriter(store("auto"), "fedfleet", None, "run")
    writer.begin(TOP, lambda: RunHeader("mine", {"axis.β, %": "x"}, {"classes": {"a (b)": 1}}))
    for number in (1, 2):
        writer.rounds(TOP, [{"round": number, "train/loss": 0.5, **odd}])
    writer.end(End(TOP, "finished"))
    writer.close()
    assert capsys.readouterr().err == ""
    client, run = only_run(store("auto"))
    found = dict(run.data.metrics)
    assert (found.pop("top-5 ____ α"), found.pop("a_"), found.pop("train/loss"), found.pop("_/b")) == (1, 3, 0.5, 5)
    assert (found.pop("c/_/d"), sorted(found.values())) == (6, [2, 4, 7])
    assert all(name.startswith(("a__", "é")) for name in found)
    assert [metric.step for metric in client.get_metric_history(run.info.run_id, "top-5 ____ α")] == [1, 2]
    assert (run.info.status, run.data.tags["axis.β_ _"], run.data.params) == ("FINISHED", "x", {"classes.a _b_": "1"})


def test_what_the_store_refuses_stops_nothing_else(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """A store with rules of its own refuses a metric of every round, and all of a nested run: the rest is written."""
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    log, create = MlflowClient.log_batch, MlflowClient.create_run

    def log_batch(client: Any, run_id: str, metrics: Any = (), **further: Any) -> None:
        if any(metric.key == "bad" for metric in metrics):
            raise MlflowException.invalid_parameter_value("the metric bad is not allowed here")
        log(client, run_id, metrics=metrics, **further)

    def create_run(client: Any, place: str, run_name: str, **further: Any) -> Any:
        if run_name == "refused":
            raise MlflowException.invalid_parameter_value("the run is not allowed here")
        return create(client, place, run_name=run_name, **further)

    monkeypatch.setattr(MlflowClient, "log_batch", log_batch)
    monkeypatch.setattr(MlflowClient, "create_run", create_run)
    writer = MlflowWriter(store("auto"), "fedfleet", None, "study", "fedfleet.cell")
    for key in (TOP, "refused", "good"):
        writer.begin(key, lambda key=key: RunHeader(key or "top", {}))
    for key in ("refused", "good"):
        writer.rounds(key, [{"round": number, "bad": 1.0, "train/loss": 0.5} for number in (1, 2)])
        writer.end(End(key, "finished"))
    writer.end(End(TOP, "finished"))
    writer.close()
    assert capsys.readouterr().err.count("warning: the store refuses some values, which are not tracked") == 1
    assert not writer.known  # which would grow with all values of a study
    client = MlflowClient(store("auto"))
    place = client.get_experiment_by_name("fedfleet")
    assert place is not None
    runs = {run.info.run_name: run for run in client.search_runs([place.experiment_id])}
    assert {name: run.info.status for name, run in runs.items()} == {"top": "FINISHED", "good": "FINISHED"}
    assert runs["good"].data.metrics == {"train/loss": 0.5}
    assert len(client.get_metric_history(runs["good"].info.run_id, "train/loss")) == 2


# --- addresses --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "uri",
    [
        "sqlite:///a.db",
        "sqlite:////a/b.db",
        "http://127.0.0.1:5000",
        "https://host/path",
        "postgresql+psycopg2://u@h/d",
        "mysql+pymysql://h/d",
        "databricks",
        "databricks://profile",
    ],
)
def test_stores(uri: str):
    assert store(uri) == uri


@pytest.mark.parametrize("uri", ["", "mlruns", "./mlruns", "/a/b", "file:///a", "ftp://h", "sqlite:a", "http://", "5"])
def test_other_addresses_are_refused(uri: str, here: Path):
    with pytest.raises(ConfigError, match=r"^tracking\.uri must be auto, none, sqlite:///"):
        store(uri)
    done = invoke(*RUN, f"tracking.uri='{uri}'")
    assert done.exit_code == 2
    assert len(done.stderr.splitlines()) == 1
    assert not list(here.iterdir())


def test_auto_is_a_file_here(here: Path):
    assert store("auto") == f"sqlite:///{here / 'mlflow.db'}"


@pytest.mark.parametrize(
    ("text", "safe"),
    [
        ("https://bob:hunter2@h:5000/x", "https://***@h:5000/x"),
        ("postgresql://bob:hun%40ter2@h/d", "postgresql://***@h/d"),
        ("https://bob:hun@ter2@h/d", "https://***@h/d"),
        ("https://:hunter2@h", "https://***@h"),
        ("https://hunter2@h", "https://***@h"),
        ("postgresql://h/d?user=bob&password=hunter2&ssl=1", "postgresql://h/d?user=bob&password=***&ssl=1"),
        ("sqlite:////a/b@c.db", "sqlite:////a/b@c.db"),
        ("http://h/a@b", "http://h/a@b"),
        ("auto", "auto"),
    ],
)
def test_a_configuration_is_written_without_secrets(text: str, safe: str):
    experiment = Experiment(workload="digits", method="fedavg", tracking={"uri": text})
    assert experiment.plain()["tracking"]["uri"] == safe


def test_a_refused_address_does_not_show_its_password():
    done = invoke(*RUN, f"tracking.uri=ftp://bob:{SECRET}@h")
    assert done.exit_code == 2
    assert SECRET not in done.output
    shown = invoke("show", "digits", f"tracking.uri=http://bob:{SECRET}@h")
    assert shown.exit_code == 0
    assert SECRET not in shown.output


def test_the_saved_configuration_still_validates(here: Path):
    experiment = load("digits", [f"tracking.uri=http://bob:{SECRET}@127.0.0.1"])
    (here / "saved.yaml").write_text(yaml.safe_dump(experiment.plain()))
    again = load("saved.yaml")
    assert again.tracking.uri == "http://***@127.0.0.1"
    assert again.model_copy(update={"tracking": experiment.tracking}) == experiment


# --- off --------------------------------------------------------------------------------------------------------------
OFF = """
import sys
from fedfleet.tune.cli import main
main(sys.argv[1:], standalone_mode=False)
assert "mlflow" not in sys.modules
assert "ray" not in sys.modules
"""


def test_none_imports_no_mlflow(here: Path):
    done = subprocess.run(
        [sys.executable, "-c", OFF, *RUN, "tracking.uri=none"], cwd=here, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert {path.name for path in here.iterdir()} == {"mine"}


# --- small things -----------------------------------------------------------------------------------------------------
def test_flatten():
    nested = {"a": {"b": 1, "c": {"d": None}}, "e": [1, 2], "f": {}}
    assert flatten(nested) == {"a.b": "1", "a.c.d": "None", "e": "[1, 2]", "f": "{}"}


def test_the_users_own_settings_stay(here: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.delenv("MLFLOW_HTTP_REQUEST_TIMEOUT")
    done = invoke(*RUN, f"tracking.uri=http://127.0.0.1:{free_port()}")
    assert done.exit_code == 0
    assert os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] == "0"
    assert os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] == PATIENCE["MLFLOW_HTTP_REQUEST_TIMEOUT"]


def test_the_partition_is_tagged_where_it_is_the_default(here: Path):
    done = invoke(*RUN, "workload=digits", "tracking.uri=sqlite:///x.db")
    assert done.exit_code == 0, done.output
    _, run = only_run("sqlite:///x.db")
    assert run.data.tags["partition"]


def test_python_reaches_the_same_store(here: Path):
    from fedfleet.engine import run

    experiment = Experiment.model_validate(
        {
            "workload": "quadratic",
            "method": "fedavg",
            "federation": {"clients": 4, "cohort": 2, "rounds": 2},
            "engine": {"backend": "local"},
        }
    )
    run(experiment)
    with sqlite3.connect(here / "mlflow.db") as database:
        assert database.execute("select status from runs").fetchall() == [("FINISHED",)]


# --- resuming ---------------------------------------------------------------------------------------------------------
STOPPED = ("run", "digits", "engine.backend=local", "checkpoint.every=2", "--out", "mine")


def statuses(uri: str) -> tuple[Any, Any]:
    client, run = only_run(uri)
    history = client.get_metric_history(run.info.run_id, "train/loss")
    return run.info.status, sorted(metric.step for metric in history)


@pytest.mark.long
def test_a_resumed_run_is_the_same_run_in_mlflow(here: Path, monkeypatch: pytest.MonkeyPatch):
    """Killed, asked to stop, and resumed from another folder: one MLflow run with every round once."""
    uri, log = f"sqlite:///{here / 'mlflow.db'}", here / "mine" / "run.log"
    for number, command in ((signal.SIGKILL, STOPPED), (signal.SIGTERM, ("resume", "mine"))):
        seen = log.read_text().count("\n") if log.is_file() else 0
        process = subprocess.Popen([*COMMAND, *command, "federation.rounds=50000"], cwd=here, stderr=subprocess.PIPE)
        try:
            until(lambda: (here / "mine" / "mlflow.json").is_file(), "the run in MLflow")
            until(lambda seen=seen: log.read_text().count("\n") > seen + 20, "twenty rounds")
            until(lambda: list((here / "mine" / "checkpoints").glob("round-*")), "a checkpoint")
            process.send_signal(number)
            process.communicate(timeout=300)
        finally:
            process.kill()
        assert process.returncode in (-signal.SIGKILL, 128 + signal.SIGTERM)
    status, known = statuses(uri)
    assert status == "KILLED"
    rounds = max(known) + 5
    (here / "elsewhere").mkdir()
    monkeypatch.chdir(here / "elsewhere")
    done = invoke("resume", "../mine", f"federation.rounds={rounds}", "--quiet")
    assert (done.exit_code, done.stderr) == (0, "")
    status, known = statuses(uri)
    assert status == "FINISHED"
    assert known == list(range(1, rounds + 1))
    assert not list((here / "elsewhere").iterdir())
    assert json.loads((here / "mine" / "mlflow.json").read_text())["uri"] == uri


def test_rounds_that_are_run_again_are_there_once(here: Path):
    """As after the loss of a node: the tracker gets the rounds 1 to 4, and then 3 to 6."""
    uri = f"sqlite:///{here / 'mlflow.db'}"
    tracker = MlflowTracker(uri)
    tracker.begin(prepare(load("digits"), "again"))
    for time_, number in enumerate((1, 2, 3, 4, 3, 4, 5, 6)):
        tracker.record({"round": number, "train/loss": 1 / number, "time/seconds": float(time_)})
    tracker._close("finished")
    assert statuses(uri) == ("FINISHED", [1, 2, 3, 4, 5, 6])
    client, run = only_run(uri)
    history = client.get_metric_history(run.info.run_id, "time/seconds")
    assert sorted((metric.step, metric.value) for metric in history) == [(1, 0), (2, 1), (3, 2), (4, 3), (5, 6), (6, 7)]


def test_a_process_that_ends_right_after_it_began_a_run_leaves_no_second_one(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """The store has the run, and the folder does not have its id yet."""
    uri, header = f"sqlite:///{here / 'mlflow.db'}", RunHeader("mine", {"kind": "run"}, {"a": 1})

    def written() -> None:
        writer = MlflowWriter(uri, "fedfleet", here, "run")
        writer.begin(TOP, lambda: header)
        writer.rounds(TOP, [{"round": 1, "train/loss": 0.5}])
        writer.end(End(TOP, "finished"))
        writer.close()

    def ends(*_: Any) -> None:
        raise OSError("the process is killed here")

    with monkeypatch.context() as patched:
        patched.setattr(MlflowWriter, "_parameters", ends)
        written()
    assert "the process is killed here" in capsys.readouterr().err
    begun = json.loads((here / "mlflow.json").read_text())
    assert begun["run_id"] == ""
    written()
    _, run = only_run(uri)
    assert json.loads((here / "mlflow.json").read_text()) == {**begun, "run_id": run.info.run_id}
    assert (run.info.status, run.data.params, run.data.metrics["train/loss"]) == ("FINISHED", {"a": "1"}, 0.5)


def test_a_process_that_ends_right_before_it_ends_a_nested_run_leaves_none_running(here: Path):
    """The store has the tag `status` of a trial that has ended, and still calls the trial running. Trials that have
    ended are written once."""
    from mlflow import MlflowClient

    uri = f"sqlite:///{here / 'mlflow.db'}"

    def written() -> None:
        writer = MlflowWriter(uri, "fedfleet", here, "search", child_tag="fedfleet.trial")
        writer.begin(TOP, lambda: RunHeader("mine", {"kind": "search"}, {}))
        for key in ("0", "1"):
            writer.begin(key, lambda key=key: RunHeader(f"trial {key}", {}, {}))
            writer.end(End(key, "finished", once=True))
        writer.end(End(TOP, "finished"))
        writer.close()

    written()
    client = MlflowClient(uri)
    (place,) = (each.experiment_id for each in client.search_experiments() if each.name == "fedfleet")
    runs = {run.info.run_name: run for run in client.search_runs([place])}
    killed, ended = runs["trial 0"], runs["trial 1"]
    client.update_run(killed.info.run_id, status="RUNNING")
    written()
    assert {run.info.status for run in client.search_runs([place])} == {"FINISHED"}
    assert client.get_run(ended.info.run_id).info.end_time == ended.info.end_time, "it was written again"


def test_another_machine_without_the_database_begins_one(here: Path):
    """The folder of the run names a database that does not exist, so a new MLflow run begins."""
    (here / "mlflow.json").write_text(json.dumps({"uri": f"sqlite:///{here / 'no' / 'such.db'}", "run_id": "x"}))
    assert MlflowTracker(directory=str(here)).uri == f"sqlite:///{here / 'mlflow.db'}"


def test_a_run_that_the_store_has_lost_is_begun_anew(here: Path):
    chosen = load("digits", ["engine.backend=local", "federation.rounds=7", "tracking.uri=none"])
    with pytest.raises(Interrupted):
        start(chosen, "mine", [Watch(r5=interrupt)])
    (here / "mine" / "mlflow.json").write_text(json.dumps({"uri": "sqlite:///gone.db", "run_id": "0" * 32}))
    done = invoke("resume", "mine", "tracking.uri=sqlite:///runs.db", "--quiet")
    assert (done.exit_code, done.stderr) == (0, "")
    assert statuses("sqlite:///runs.db") == ("FINISHED", [1, 2, 3, 4, 5, 6, 7])

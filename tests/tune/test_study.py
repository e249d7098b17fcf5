"""Running studies: they go on when cells fail, and a resumed study runs nothing twice."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import psutil
import pytest
import yaml

from fedfleet.engine import run
from fedfleet.engine.config.schema import experiment
from fedfleet.engine.errors import Interrupted
from fedfleet.engine.runs.saved_files import read_rows
from fedfleet.engine.stopping import Stop
from fedfleet.engine.storage.lock import exclusive
from fedfleet.tune.executor.source import Executor, RunReport, Source
from fedfleet.tune.study.cells import cells
from fedfleet.tune.study.check import with_direction
from fedfleet.tune.study.folder import StudyFolder
from fedfleet.tune.study.searches import searches
from fedfleet.tune.study.spec import load
from fedfleet.tune.study_run.observers import StudyTracker
from fedfleet.tune.study_run.runner import results_so_far, run_study, search_ranges

from ..faults.runs import untimed
from .commands import COMMAND, below, invoke, shell, until
from .small_study import STUDY, written
from .test_tracking import commit_here

pytestmark = pytest.mark.usefixtures("one_fork_server")


def stored(folder: Path) -> str:
    return f"sqlite:///{folder / 'mlflow.db'}"


def children(folder: Path, name: str) -> list[Any]:
    """The runs of the cells in MLflow, read by MLflow's client."""
    from mlflow import MlflowClient

    client = MlflowClient(stored(folder))
    kept = json.loads((folder / name / "mlflow.json").read_text())
    (found,) = [e for e in client.search_experiments() if e.name == "small"]
    runs = client.search_runs([found.experiment_id], f"tags.`mlflow.parentRunId` = '{kept['run_id']}'")
    assert client.get_run(kept["run_id"]).info.status == "FINISHED"
    return list(runs)


def results(folder: Path) -> dict[str, dict[str, Any]]:
    """Key -> result.json of the cells that have finished."""
    return {path.parent.name: json.loads(path.read_text()) for path in folder.glob("cells/*/result.json")}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the study with tuning and MLflow, run with eight simultaneous cells."""
    folder = tmp_path_factory.mktemp("undisturbed")
    file = written(folder, tune={"each": "cell"}, tracking={"uri": stored(folder)})
    commit_here(folder)
    done = shell(folder, "study", file, "--out", "out", "--jobs", "8", timeout=500)
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr
    (folder / "stdout").write_text(done.stdout)
    return folder


def test_every_cell_is_the_run_that_its_configuration_says(undisturbed: Path):
    folder = StudyFolder(undisturbed / "out")
    found = results(folder.path)
    assert len(found) == 8 + 4  # FedAvg's trials, two a cell, of which the best is the cell; SCAFFOLD's cells
    for cell in folder.cells()[::3]:
        assert run(experiment(cell.data)).model_sha256 == found[cell.key]["model_sha256"]
    for cell in folder.cells():
        if cell.method == "FedAvg":
            rivals = [p for p in found if same_but_rate(folder.path / "cells" / p, folder.of(cell))]
            best = max(found[p]["metrics"]["eval/accuracy"] for p in rivals)
            assert len(rivals) == 2
            assert found[cell.key]["metrics"]["eval/accuracy"] == best


def same_but_rate(a: Path, b: Path) -> bool:
    x, y = (yaml.safe_load((path / "config.yaml").read_text()) for path in (a, b))
    return [x[k] for k in ("seed", "workload")] == [y[k] for k in ("seed", "workload")] and (
        x["method"]["name"] == y["method"]["name"]
    )


def test_mlflow_has_a_parent_and_a_run_for_each_cell(undisturbed: Path):
    runs = children(undisturbed, "out")
    assert len(runs) == 8
    folder = StudyFolder(undisturbed / "out")
    by_key = {cell.key: cell for cell in folder.cells()}
    (head,) = (undisturbed / ".git/refs/heads").iterdir()
    commit = head.read_text().strip()
    from mlflow import MlflowClient

    client = MlflowClient(stored(undisturbed))
    for found in runs:
        tags, cell = found.data.tags, by_key.pop(found.data.tags["fedfleet.cell"])
        assert (tags["method"], tags["level"], tags["seed"]) == (cell.method, cell.place[0], str(cell.seed))
        assert (tags["workload"], tags["status"], tags["reduced"]) == ("logistic", "finished", "no")
        assert tags["axis.beta"] == cell.place[0]
        assert tags["mlflow.source.git.commit"] == tags["commit"] == commit
        assert [used.dataset.name for used in found.inputs.dataset_inputs] == ["logistic"]
        assert found.data.params["method.rule.lr"] == str(cell.data["method"]["rule"]["lr"])
        history = client.get_metric_history(found.info.run_id, "eval/accuracy")
        assert [m.step for m in history] == [2, 4, 6]
        points = folder.points(cell, "eval/accuracy")
        assert points is not None
        assert [m.value for m in history] == points.values.tolist()
        assert {"config.yaml", "rounds.parquet", "curve.svg"} <= {
            a.path for a in client.list_artifacts(found.info.run_id)
        }
    assert not by_key
    kept = json.loads((undisturbed / "out/mlflow.json").read_text())
    assert {"study.yaml", "report.html", "report.md"} <= {a.path for a in client.list_artifacts(kept["run_id"])}
    top = client.get_run(kept["run_id"])
    assert top.data.tags["kind"] == "study"
    assert f"/runs/{kept['run_id']}/artifacts/report.html" in top.data.tags["mlflow.note.content"]


def test_the_password_of_a_store_stays_in_study_yaml(tmp_path: Path):
    """Only its owner may read the file then; MLflow gets another text."""
    study, folder = (
        load(written(tmp_path, tracking={"uri": "http://me:s3cret@127.0.0.1:1/"})),
        StudyFolder(tmp_path / "out"),
    )
    folder.keep(study)
    assert folder.study.tracking == study.tracking
    assert (tmp_path / "out" / "study.yaml").stat().st_mode & 0o777 == 0o600
    tracker = StudyTracker(study, folder)
    for writer in tracker.writers:
        writer.abandon()
    (text,) = tracker.settings().values()
    assert yaml.safe_load(text)["tracking"]["uri"] == "http://***@127.0.0.1:1/"
    folder.keep(load(written(tmp_path)))
    assert (tmp_path / "out" / "study.yaml").stat().st_mode & 0o044 == 0o044


def test_a_cell_that_another_version_ran_is_tracked_with_that_version(tmp_path: Path):
    study = with_direction(load(written(tmp_path, tracking={"uri": "none"})))
    folder = StudyFolder(tmp_path / "out")
    tracker = StudyTracker(study, folder)
    first, other, *_ = cells(study)
    for cell, environment in ((first, {"packages": {"fedfleet": "0.0.9"}, "commit": "c0ffee"}), (other, {"cpus": 2})):
        folder.of(cell).mkdir(parents=True)
        (folder.of(cell) / "environment.json").write_text(json.dumps(environment))
    made = [
        {tag: tracker._header(cell).tags.get(f"fedfleet.{tag}") for tag in ("version", "commit")}
        for cell in (first, other)
    ]
    assert made == [{"version": "0.0.9", "commit": "c0ffee"}, {"version": None, "commit": None}]


def test_done_again_it_runs_nothing(undisturbed: Path):
    before = {path: path.stat().st_mtime_ns for path in undisturbed.glob("out/cells/*/*")}
    done = invoke("study", str(undisturbed / "small.yaml"), "--out", str(undisturbed / "out"))
    assert done.exit_code == 0, done.output
    assert told(done.stdout) == told((undisturbed / "stdout").read_text())
    assert {path: path.stat().st_mtime_ns for path in undisturbed.glob("out/cells/*/*")} == before
    assert len(children(undisturbed, "out")) == 8


def test_a_method_that_is_called_otherwise_later(tmp_path: Path):
    """Its cells are the same, and their runs in MLflow have the new name and tags; other names stay."""
    from mlflow import MlflowClient

    methods = {name: {"name": "fedavg", "rule": {"name": "sgd", "lr": lr}} for name, lr in (("Old", 0.1), ("B", 0.2))}
    further = {"axes": {}, "seeds": [0], "tracking": {"uri": stored(tmp_path)}}
    for labels in (("Old", "B"), ("New", "B")):
        changed = dict(zip(labels, methods.values(), strict=True))
        done = invoke("study", written(tmp_path, methods=changed, **further), "--out", str(tmp_path / "out"))
        assert done.exit_code == 0, done.output
        runs = {run.data.tags["method"]: run.info for run in children(tmp_path, "out")}
        assert set(runs) == set(labels)
        assert runs[labels[0]].run_name == f"{labels[0]}, seed 0"
        assert {info.status for info in runs.values()} == {"FINISHED"}
        if "Old" in labels:
            MlflowClient(stored(tmp_path)).update_run(runs["B"].run_id, name="a reader's own name")
    assert runs["B"].run_name == "a reader's own name"


def told(stdout: str) -> list[str]:
    """The lines of the output without the last one, which names the folder."""
    return stdout.splitlines()[:-1]


def started(folder: Path, file: str) -> subprocess.Popen[str]:
    command = [*COMMAND, "study", file, "--out", "out", "--jobs", "2"]
    return subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True, start_new_session=True)


EXECUTES = re.compile(r"tune\.executor\.process_main import serve")
"""What the command lines of processes contain that execute cells."""


def records(folder: Path) -> dict[str, list[dict[str, float]]]:
    """Key -> the records of the cells that have finished, without times."""
    return {key: untimed(read_rows(folder / "cells" / key / "rounds.parquet")) for key in results(folder)}


def equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Check that the cells and their models are the same."""
    assert {key: r["model_sha256"] for key, r in found.items()} == {k: r["model_sha256"] for k, r in expected.items()}


@pytest.mark.long
def test_killed_and_gone_on_with(tmp_path: Path, undisturbed: Path):
    """After SIGKILL in the middle, the processes that run cells end too, finished cells are kept, and the resumed study
    has the results of an undisturbed one."""
    file = written(tmp_path, tune={"each": "cell"}, tracking={"uri": stored(tmp_path)})
    process = started(tmp_path, file)
    until(lambda: len(results(tmp_path / "out")) >= 3, "three cells")
    family = below(process)
    workers = [child for child, words in family.items() if EXECUTES.search(words)]
    assert workers, family
    process.kill()
    _, stderr = process.communicate(timeout=300)
    assert not psutil.wait_procs(workers, timeout=120)[1]
    assert "Traceback" not in stderr
    before = results(tmp_path / "out")
    assert len(before) < len(results(undisturbed / "out"))
    done = shell(tmp_path, "study", file, "--out", "out", "--jobs", "2", timeout=500)
    assert done.returncode == 0, done.stderr
    after = results(tmp_path / "out")
    equal(after, results(undisturbed / "out"))
    assert records(tmp_path / "out") == records(undisturbed / "out")
    assert {key: after[key]["run_id"] for key in before} == {key: r["run_id"] for key, r in before.items()}
    assert len(children(tmp_path, "out")) == 8


@pytest.mark.long
def test_interrupted_and_gone_on_with(tmp_path: Path, undisturbed: Path):
    """All processes get the signal twice, as batch systems send it."""
    file = written(tmp_path, tune={"each": "cell"})
    process = started(tmp_path, file)
    until(lambda: results(tmp_path / "out"), "a cell")
    workers = below(process)
    for each in 2 * [*workers, psutil.Process(process.pid)]:
        with suppress(psutil.NoSuchProcess):
            each.terminate()
    _, stderr = process.communicate(timeout=300)
    assert process.returncode == 128 + signal.SIGTERM
    assert stderr.splitlines()[-1].startswith("interrupted; to go on: give the same command again")
    assert "Traceback" not in stderr
    assert not psutil.wait_procs(workers, timeout=120)[1]
    done = shell(tmp_path, "study", file, "--out", "out", timeout=500)
    assert done.returncode == 0, done.stderr
    equal(results(tmp_path / "out"), results(undisturbed / "out"))
    assert records(tmp_path / "out") == records(undisturbed / "out")


BAD = """
import os
from dataclasses import dataclass
from fedfleet.algorithms.local import Estimator, LocalMethod
from fedfleet.algorithms.parts.rules import Sgd
from fedfleet.algorithms.parts.servers import Mean

@dataclass(frozen=True)
class Bad(Estimator):
    how: str

    def estimate(self, oracle, y, c, c_i, trace):
        if self.how == "raises":
            raise RuntimeError("no <b>gradient</b>")
        if self.how == "dies":
            os.kill(os.getpid(), 9)
        if self.how == "fine":
            return oracle(y), trace
        return oracle(y) * 1e30, trace

def bad(how: str) -> LocalMethod:
    \"\"\"a method that goes wrong\"\"\"
    return LocalMethod(Sgd(1.0), Bad(how), Mean(1.0))

METHODS = {"bad": bad}
"""


def test_trials_that_fail_are_told(tmp_path: Path):
    """Tuning chooses among the others."""
    (tmp_path / "bad.py").write_text(BAD)
    method = {"name": "bad", "how": {"search": "grid", "values": ["raises", "fine"]}}
    file = written(tmp_path, plugins=["bad.py"], methods={"A": method}, axes={}, seeds=[0], tune={"each": "level"})
    done = invoke("study", file, "--out", str(tmp_path / "out"), "--jobs", "1")
    assert done.exit_code == 1
    assert (
        "1 cells finished, 0 diverged, 0 failed; 1 trials failed, so the choice of settings lacks them" in done.stdout
    )
    report = (tmp_path / "out" / "report.md").read_text()
    assert "how fine" in report
    assert re.search(r"\| A \|.*\| trial failed \|.*no .*gradient", report)


@pytest.mark.long
def test_bad_cells_are_recorded_and_the_study_goes_on(tmp_path: Path):
    (tmp_path / "bad.py").write_text(BAD)
    methods = {how: {"name": "bad", "how": how} for how in ("raises", "dies", "explodes")}
    file = written(
        tmp_path,
        plugins=["bad.py"],
        methods={**methods, "SCAFFOLD": STUDY["methods"]["SCAFFOLD"]},
        seeds=[0],
        tracking={"uri": stored(tmp_path)},
    )
    command = ("study", file, "--out", str(tmp_path / "out"), "--jobs", "2")
    done = invoke(*command)
    assert done.exit_code == 1
    assert done.stderr.splitlines()[-1].startswith("error: 4 cells or trials of the study failed")
    folder = StudyFolder(tmp_path / "out")
    status = {(cell.method, cell.place[0]): folder.status(cell) for cell in folder.cells()}
    assert [status[m, "beta = 0.5"] for m in ("raises", "dies", "explodes", "SCAFFOLD")] == [
        *("failed", "failed", "diverged", "finished")
    ]
    reasons = {cell.method: folder.failure(cell).get("reason", "") for cell in folder.cells()}
    assert "no <b>gradient</b>" in reasons["raises"]
    assert reasons["dies"].startswith("the run's process died, twice")
    assert reasons["explodes"].startswith("diverged in round ")
    page = (folder.path / "report.html").read_text()
    assert "no &lt;b&gt;gradient&lt;/b&gt;" in page
    ends = {r.data.tags["method"]: (r.data.tags["status"], r.info.status) for r in children(tmp_path, "out")}
    assert ends["dies"] == ("failed", "FAILED")
    assert ends["explodes"] == ("diverged", "FAILED")

    # the next time only those that failed are tried
    before = {cell.key: log_of(folder, cell) for cell in folder.cells()}
    assert invoke(*command).exit_code == 1
    changed = {cell.method for cell in folder.cells() if log_of(folder, cell) != before[cell.key]}
    assert changed == {"raises", "dies"}
    assert len(children(tmp_path, "out")) == 8


@pytest.mark.long
def test_cells_run_on_a_cluster_that_is_there(tmp_path: Path, ray_here: None):
    """The cells have the same bits as on this machine alone; without --jobs, as many run at the same time as fit."""
    import ray

    file = written(tmp_path, seeds=[0])
    address = ray.get_runtime_context().gcs_address
    done = shell(tmp_path, "study", file, "--out", "there", "--address", address, timeout=500)
    assert done.returncode == 0, done.stderr
    found = StudyFolder(tmp_path / "there")
    assert len(found.cells()) == 4
    for cell in found.cells():
        assert found.result(cell)["model_sha256"] == run(experiment(cell.data)).model_sha256


def test_an_address_where_no_cluster_is(tmp_path: Path):
    done = shell(tmp_path, "study", written(tmp_path), "--out", "out", "--address", "127.0.0.1:1")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: engine.address=127.0.0.1:1: no cluster answers there")


def log_of(folder: StudyFolder, cell: Any) -> str:
    return (folder.of(cell) / "run.json").read_text()


@pytest.mark.long
def test_a_changed_study_uses_what_has_been_run(tmp_path: Path):
    file = written(tmp_path, seeds=[0])
    assert invoke("study", file, "--out", str(tmp_path / "out")).exit_code == 0
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("out/cells/*/result.json")}
    assert invoke("study", written(tmp_path, seeds=[0, 1]), "--out", str(tmp_path / "out")).exit_code == 0
    after = {path: path.stat().st_mtime_ns for path in tmp_path.glob("out/cells/*/result.json")}
    assert len(after) == 2 * len(before)
    assert {path: after[path] for path in before} == before


def test_only_one_study_in_a_folder(tmp_path: Path):
    file = written(tmp_path)
    with exclusive(tmp_path / "out", ".study.lock"):
        done = invoke("study", file, "--out", str(tmp_path / "out"))
    assert done.exit_code == 2
    assert f"is in use by process {os.getpid()}" in done.output


@pytest.mark.long
def test_what_is_smaller_says_so_everywhere(tmp_path: Path):
    file = written(tmp_path, tracking={"uri": stored(tmp_path)})
    done = invoke("study", file, "seeds=[0]", "--rounds", "2", "--out", str(tmp_path / "out"))
    assert done.exit_code == 0, done.output
    notes = ("2 rounds, in full 6", "seeds is [0], in the file [0, 1]")
    assert load(str(tmp_path / "out/study.yaml")).notes == notes
    for note in notes:
        assert note in done.stdout
        assert note in done.stderr
        assert note in (tmp_path / "out/report.html").read_text()
        assert note.replace("[", r"\[").replace("]", r"\]") in (tmp_path / "out/report.md").read_text()
    assert all(run.data.tags["reduced"] == "; ".join(notes) for run in children(tmp_path, "out"))


@pytest.mark.long
def test_ranges_are_searched(tmp_path: Path, ray_here: None):
    """A method with a range gets the values that a search finds, and the search is not repeated."""
    rate = {"search": "loguniform", "low": 1e-3, "high": 0.3}
    file = written(
        tmp_path,
        methods={"FedAvg": {"name": "fedavg", "rule": {"name": "sgd", "lr": rate}}},
        axes={},
        tune={"each": "level", "trials": 3, "rounds": 2},
    )
    done = invoke("study", file, "--out", str(tmp_path / "out"), "--jobs", "2")
    assert done.exit_code == 0, done.output
    folder = StudyFolder(tmp_path / "out")
    (result,) = [json.loads(path.read_text()) for path in folder.path.glob("searches/*/result.json")]
    assert result["trials"] == 3
    found = folder.cells()
    assert [cell.settings for cell in found] == [result["best"]["params"]] * 2
    for cell in found:
        config = yaml.safe_load((folder.of(cell) / "config.yaml").read_text())
        assert config["method"]["rule"]["lr"] == result["best"]["params"]["method.rule.lr"]
    before = {path: path.stat().st_mtime_ns for path in folder.path.glob("*/*/result.json")}
    assert invoke("study", file, "--out", str(tmp_path / "out")).exit_code == 0
    assert {path: path.stat().st_mtime_ns for path in folder.path.glob("*/*/result.json")} == before


class Here(Executor):
    """Executes the runs of a source in this process, one after the other. `folders`: of the runs."""

    def __init__(self) -> None:
        self.folders: list[Path] = []

    def run(self, source: Source[Any], stop: Any) -> None:
        while request := source.next():
            self.folders.append(Path(request.folder))
            rows = run(experiment(request.experiment), request.folder).rows
            source.on_report(request.key, RunReport(list(rows), "finished", ""))


def test_the_searches_run_where_the_cells_do(tmp_path: Path):
    """So that --jobs bounds them too."""
    rate = {"search": "loguniform", "low": 1e-3, "high": 0.3}
    methods = {"FedAvg": {"name": "fedavg", "rule": {"name": "sgd", "lr": rate}}}
    study = with_direction(load(written(tmp_path, methods=methods, tune={"each": "level", "trials": 2})))
    folder, executor = StudyFolder(tmp_path / "out"), Here()
    search_ranges(study, folder, executor, Stop(), quiet=True)
    places = [folder.search_of(key) / "trials" / f"{number:04d}" for key in searches(study) for number in (0, 1)]
    assert executor.folders == places
    assert all(folder.searched(key) for key in searches(study))


def test_the_trials_of_an_interrupted_search_are_shown_by_its_report(tmp_path: Path):
    """The report of the study has none of them."""
    rate = {"search": "loguniform", "low": 1e-3, "high": 0.3}
    methods = {"FedAvg": {"name": "fedavg", "rule": {"name": "sgd", "lr": rate}}}
    study = with_direction(load(written(tmp_path, methods=methods, axes={}, tune={"each": "level", "trials": 2})))
    folder, stop = StudyFolder(tmp_path / "out"), Stop()
    folder.keep(study)
    assert "search" not in results_so_far(study, folder)

    class OneTrial(Here):
        def run(self, source: Source[Any], stops: Any) -> None:
            request = source.next()
            assert request is not None
            rows = run(experiment(request.experiment), request.folder).rows
            source.on_report(request.key, RunReport(list(rows), "finished", ""))
            stop.number = signal.SIGINT

    with pytest.raises(Interrupted):
        search_ranges(study, folder, OneTrial(), stop, quiet=True)
    (key,) = searches(study)
    assert results_so_far(study, folder).endswith(
        f"; fedfleet report {folder.search_of(key)} shows the trials of a search"
    )
    for place in (folder.path, folder.search_of(key)):
        assert invoke("report", str(place)).exit_code == 0
        assert (place / "report.html").is_file()


@pytest.mark.long
def test_interrupted_in_a_search(tmp_path: Path):
    """The message has the command of the study, since that of the search would not run the cells."""
    rate = {"search": "loguniform", "low": 1e-3, "high": 0.3}
    methods = {"FedAvg": {"name": "fedavg", "rule": {"name": "sgd", "lr": rate}}}
    process = started(tmp_path, written(tmp_path, methods=methods, axes={}, tune={"each": "level", "trials": 5000}))
    until(lambda: [*tmp_path.glob("out/searches/*/trials/*/result.json")], "a trial")
    os.killpg(process.pid, signal.SIGINT)
    _, stderr = process.communicate(timeout=300)
    assert process.returncode == 128 + signal.SIGINT
    assert stderr.splitlines()[-1].startswith("interrupted; to go on: give the same command again")
    assert "Traceback" not in stderr
    assert not [*tmp_path.glob("out/searches/*/result.json")]


@pytest.mark.parametrize("moment", ["found.write_search_report", "run.try_out"])
def test_interrupted_between_searches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str):
    """Ctrl-C while a search writes its report, or is being prepared, ends the study: no trial begins after it. What the
    search has found stays."""
    rate = {"search": "loguniform", "low": 1e-3, "high": 0.3}
    methods = {"FedAvg": {"name": "fedavg", "rule": {"name": "sgd", "lr": rate}}}
    written(tmp_path, methods=methods, tune={"each": "level", "trials": 2})
    place = f"fedfleet.tune.search.{moment}"
    does = resolve_name(place)

    def interrupted(*args: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return does(*args)

    monkeypatch.setattr(place, interrupted)
    folder = StudyFolder(tmp_path / "out")
    with pytest.raises(Interrupted, match=r"give the same command again; .* and fedfleet report .*out shows them"):
        run_study(load(str(tmp_path / "small.yaml")), folder.path, 2, quiet=True)
    results = [path.parent.name for path in folder.path.glob("searches/*/result.json")]
    begun = {path.parts[-3] for path in folder.path.glob("searches/*/trials/*")}
    assert len(results) == len(begun) == (1 if moment == "found.write_search_report" else 0)
    assert not list(folder.path.glob("cells/*"))


def test_a_range_needs_something_that_decides(tmp_path: Path):
    rate = {"search": "loguniform", "low": 1e-3, "high": 0.3}
    methods = {"FedAvg": {"name": "fedavg", "rule": {"name": "sgd", "lr": rate}}}
    done = invoke("study", written(tmp_path, methods=methods), "--out", str(tmp_path / "out"))
    assert done.exit_code == 2
    assert "methods.FedAvg contains a range, but tune.each is none; set it" in done.output

"""A start that fails removes only the files that it wrote, and the next start may use the folder."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedfleet.engine import Observer, run
from fedfleet.engine.config.schema import experiment
from fedfleet.engine.errors import ConfigError

from ..tune.commands import invoke, shell
from ..tune.small_study import written
from .runs import setting, small

MINE = {
    "notes.txt": "a user's own file",
    "figures/one.svg": "in a folder",
    "state/mine.bin": "in a folder of a run's name",
    "checkpoints/round-table/knights.txt": "of nearly a checkpoint's name",
    "clients/list.csv": "and another",
}


def put(folder: Path, names: Any = MINE) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(MINE[name])


def files(folder: Path) -> dict[str, str]:
    return {str(p.relative_to(folder)): p.read_text(errors="replace") for p in folder.rglob("*") if p.is_file()}


def too_many_clients(folder: Path, **more: Any) -> dict[str, Any]:
    """An experiment whose error is found only when the data are partitioned, after the first files of the folder have
    been written."""
    data = setting(folder, **more)
    data["federation"]["clients"] = 5000
    return data


class Meanwhile(Observer):
    """An observer that puts files into the folder when the run begins, as another process might do."""

    def __init__(self, act: Callable[[], None]) -> None:
        self.act = act

    def begin(self, run_spec: Any) -> None:
        thread = threading.Thread(target=self.act)
        thread.start()
        thread.join()


@pytest.mark.parametrize("backend", ["local", "ray"])
@pytest.mark.parametrize("there", [False, True], ids=["no folder", "a folder"])
def test_what_others_put_there_meanwhile_stays(there, backend, tmp_path, request):
    if backend == "ray":
        request.getfixturevalue("ray_here")
    out = tmp_path / "a" / "out"
    if there:
        put(out, ["notes.txt"])
    chosen = experiment(too_many_clients(tmp_path, backend=backend, workers=1))
    with pytest.raises(ConfigError, match="clients"):
        run(chosen, out, [Meanwhile(lambda: put(out))])
    assert files(out) == MINE


def test_the_command_line_does_the_same(tmp_path, monkeypatch):
    """The data set has no files, and the folder has files of a user."""
    put(tmp_path / "results")
    monkeypatch.chdir(tmp_path)
    wanted = ("engine.backend=local", "tracking.uri=none", f"workload.data_root={tmp_path}")
    done = invoke("run", "digits", "workload=svhn", *wanted, "--out", "results")
    assert done.exit_code == 2
    assert files(tmp_path / "results") == MINE
    assert not (tmp_path / "runs").exists()


def test_a_start_that_failed_does_not_block_the_next(tmp_path):
    out = tmp_path / "a" / "out"
    with pytest.raises(ConfigError):
        run(experiment(too_many_clients(tmp_path)), out)
    assert not (tmp_path / "a").exists()
    assert len(run(small(tmp_path, rounds=1), out).rows) == 1


@pytest.mark.parametrize("name", ["state", "checkpoints", "environment.json", "run.log", "model.safetensors"])
def test_a_folder_with_files_that_a_run_writes_is_refused(name, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_text("not of a run")
    with pytest.raises(ConfigError, match=rf"already holds {name}, which a run writes"):
        run(small(tmp_path, rounds=1), tmp_path / "out")
    assert files(tmp_path / "out") == {name: "not of a run"}


def test_a_run_that_is_complete_removes_its_states_and_no_more(tmp_path):
    out, store = tmp_path / "out", tmp_path / "store"

    def others() -> None:
        put(out)
        for state in store.iterdir():
            (state / "mine").write_text("a user's own file")

    run(small(tmp_path, rounds=3, checkpoint={"every": 1}, store=str(store)), out, [Later(others)])
    assert {name: text for name, text in files(out).items() if name in MINE} == MINE
    assert list(files(store).values()) == ["a user's own file"]
    assert not list((out / "checkpoints").glob("round-0*"))


class Later(Meanwhile):
    """The same observer, but the files come after the first round."""

    def begin(self, run_spec: Any) -> None: ...

    def record(self, record: Any) -> None:
        if record["round"] == 1:
            self.act()


def test_a_search_that_cannot_begin(tmp_path):
    from fedfleet.tune.search.run import search

    out = tmp_path / "out"
    put(out)
    data = {**setting(tmp_path), "search": {"trials": 1, "storage": "sqlite:////nowhere/at/all.db"}}
    data["method"]["rule"]["lr"] = {"search": "loguniform", "low": 0.01, "high": 0.1}
    with pytest.raises(ConfigError, match=r"search\.storage"):
        search(data, out)
    assert files(out) == MINE


def test_ray_that_does_not_start(tmp_path, monkeypatch):
    """Here because the paths of its sockets are too long: one sentence and no traceback."""
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / ("long" * 25)))
    done = shell(tmp_path, "study", written(tmp_path, tune={"together": False}), "--out", "out", timeout=500)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: Ray cannot start on this machine: the paths of its")


# --- the empty text ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "command",
    [
        ("run", "digits"),
        ("resume", "x"),
        ("search", "digits"),
        ("study", "heterogeneity"),
        ("partition", "digits"),
        ("submit", "digits", "--address", "http://127.0.0.1:1"),
        ("bench", "w1"),
        ("doctor",),
    ],
    ids=lambda command: command[0],
)
def test_an_empty_out_is_refused(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = invoke(*command, "--out", "")
    assert (done.exit_code, len(done.stderr.splitlines())) == (2, 1), done.output
    assert done.stderr.startswith("error: --out must name")
    assert not list(tmp_path.iterdir())


def test_an_empty_out_in_python(tmp_path, monkeypatch):
    from fedfleet.tune.search.run import search

    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="out must name a folder"):
        run(small(tmp_path), "")
    with pytest.raises(ConfigError, match="folder must name"):
        search(setting(tmp_path), "")
    assert yaml.safe_dump(files(tmp_path)) == "{}\n"

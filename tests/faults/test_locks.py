"""Only one process at a time works in a folder; others get a one-line message and change nothing."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from fedfleet.engine import run
from fedfleet.engine.api import resume
from fedfleet.engine.config.schema import experiment
from fedfleet.engine.errors import ConfigError, Interrupted, InUse
from fedfleet.engine.runs.run_directory import LAUNCHER
from fedfleet.engine.storage.lock import Lock, driver_lock, exclusive

from ..tune.commands import COMMAND, error_in, invoke, kill, until
from .faulty import ANYONE
from .runs import Watch, interrupt, plan, rule, same, setting, small

MANY = 10


def command(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen([*COMMAND, *arguments], cwd=folder, stdout=pipe, stderr=pipe, text=True)


def ended(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    """(status, standard error) of each process."""
    with ThreadPoolExecutor(len(processes)) as pool:
        said = list(pool.map(lambda process: process.communicate(timeout=500)[1], processes))
    return [(process.returncode, text) for process, text in zip(processes, said, strict=True)]


def refused(status: int, stderr: str) -> None:
    assert status == 2, stderr
    assert error_in(stderr).startswith("error: ")


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def written_out(out: Path) -> bool:
    """Whether the checkpoint of the last round in the log is on the disk, for a run with a checkpoint in every
    round."""
    rounds = (out / "run.log").read_text().count(" round=")
    return (out / "checkpoints" / f"round-{rounds:06d}.json").is_file()


@pytest.fixture
def broken_off(tmp_path) -> Path:
    out = tmp_path / "out"
    with pytest.raises(Interrupted):
        run(small(tmp_path, checkpoint={"every": 2}), out, [Watch(r3=interrupt)])
    return out


def at_the_gate(faults: Path) -> None:
    until(lambda: (faults / "at-0").exists(), "a client at the gate")


def open_gate(faults: Path) -> None:
    (faults / "open-0").touch()


# --- a run ------------------------------------------------------------------------------------------------------------
@pytest.mark.long
def test_of_many_resumes_at_once_one_goes_on(broken_off, tmp_path, expected):
    """The process that has the lock waits in a round until all others have ended."""
    plan(tmp_path, rule(ANYONE, "gate", 2, 1))
    going = [command(tmp_path, "resume", "out", "--json") for _ in range(MANY)]
    at_the_gate(tmp_path)
    until(lambda: sum(process.poll() is None for process in going) == 1, "all but one to be refused")
    lost = [process for process in going if process.poll() is not None]
    for process in lost:
        _, stderr = process.communicate()
        refused(process.returncode, stderr)
        assert "is in use by process" in stderr
    open_gate(tmp_path)
    (winner,) = [process for process in going if process not in lost]
    stdout, stderr = winner.communicate(timeout=300)
    assert winner.returncode == 0, stderr
    assert json.loads(stdout.splitlines()[-1])["model_sha256"] == expected.model_sha256
    assert (tmp_path / "out" / "run.log").read_text().count(" resumes\n") == 1


@pytest.mark.long
def test_a_run_that_goes_is_neither_resumed_nor_begun_again_and_nothing_of_it_is_touched(tmp_path, expected):
    plan(tmp_path, rule(ANYONE, "gate", 60, 1))
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(setting(tmp_path, checkpoint={"every": 1})))
    live = command(tmp_path, "run", "run.yaml", "--out", "out", "--json")
    at_the_gate(tmp_path)
    until(lambda: written_out(tmp_path / "out"), "the last checkpoint")
    before = content(tmp_path / "out")
    for arguments in (["resume", "out"], ["resume", "out", "seed=3"], ["run", "run.yaml", "--out", "out"]):
        (outcome,) = ended([command(tmp_path, *arguments)])
        refused(*outcome)
        assert content(tmp_path / "out") == before
    with pytest.raises(InUse, match=rf"in use by process {live.pid} on "):
        resume(small(tmp_path, checkpoint={"every": 1}), tmp_path / "out")
    assert content(tmp_path / "out") == before
    open_gate(tmp_path)
    stdout, stderr = live.communicate(timeout=300)
    assert live.returncode == 0, stderr
    assert json.loads(stdout.splitlines()[-1])["model_sha256"] == expected.model_sha256
    assert not [path for path in (tmp_path / "out").iterdir() if "lock" in path.name]


@pytest.mark.long
@pytest.mark.parametrize("there", [False, True], ids=["no folder", "an empty folder"])
def test_of_two_runs_into_one_folder_one_begins(there, tmp_path, expected):
    if there:
        (tmp_path / "out").mkdir()
    plan(tmp_path, rule(ANYONE, "gate", 2, 1))
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(setting(tmp_path)))
    going = [command(tmp_path, "run", "run.yaml", "--out", "out") for _ in range(3)]
    at_the_gate(tmp_path)
    until(lambda: sum(process.poll() is None for process in going) == 1, "the others to be refused")
    open_gate(tmp_path)
    outcomes = sorted(ended(going))
    assert [status for status, _ in outcomes] == [0, 2, 2], outcomes
    for outcome in outcomes[1:]:
        refused(*outcome)
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["model_sha256"] == expected.model_sha256


def test_two_threads_of_one_process(broken_off, tmp_path, expected):
    chosen, refusals = small(tmp_path, checkpoint={"every": 2}), []

    def second() -> None:
        with pytest.raises(InUse) as caught:
            resume(chosen, broken_off)
        refusals.append(str(caught.value))

    same(resume(chosen, broken_off, [Watch(r5=second)]), expected)
    assert len(refusals) == 1


@pytest.mark.long
@pytest.mark.parametrize("backend", ["local", "ray"])
def test_after_a_killed_launcher_resuming_works_at_once(backend, tmp_path, expected):
    """SIGKILL goes to the launcher alone: on Ray the driver is another process, which may live a little longer."""
    plan(tmp_path, rule(ANYONE, "gate", 60, 1))
    data = setting(tmp_path, checkpoint={"every": 1}, backend=backend, workers=1)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(data))
    live = command(tmp_path, "run", "run.yaml", "--out", "out")
    at_the_gate(tmp_path)
    family = psutil.Process(live.pid).children(recursive=True)
    live.kill()
    live.wait(300)
    open_gate(tmp_path)
    try:
        same(resume(small(tmp_path, checkpoint={"every": 1}), tmp_path / "out"), expected)
    finally:
        kill(psutil.wait_procs(family, timeout=2)[1])  # processes of Ray, which no other process ends


def test_a_driver_that_outlives_its_launcher_is_waited_for(broken_off, tmp_path, expected, monkeypatch):
    monkeypatch.setattr("fedfleet.engine.storage.lock.ORPHAN_SECONDS", 0.2)
    chosen, before = small(tmp_path, checkpoint={"every": 2}), content(broken_off)
    with driver_lock(broken_off):
        held = content(broken_off)
        with pytest.raises(InUse, match=f"in use by process {os.getpid()}"):
            resume(chosen, broken_off)
        assert content(broken_off) == held
    assert content(broken_off) == before
    monkeypatch.setattr("fedfleet.engine.storage.lock.ORPHAN_SECONDS", 60)
    taken, done = threading.Event(), threading.Event()

    def orphan() -> None:
        with driver_lock(broken_off):
            taken.set()
            done.wait(300)

    thread = threading.Thread(target=orphan)
    thread.start()
    assert taken.wait(300)
    threading.Timer(0.5, done.set).start()
    same(resume(chosen, broken_off), expected)
    assert done.is_set()
    thread.join()


def test_a_detached_run_is_refused_where_its_folder_is_taken(tmp_path, ray_here, monkeypatch):
    from fedfleet.engine.runs import detached
    from fedfleet.engine.runs.prepare import new_run_id, prepare

    monkeypatch.setattr(detached, "connect", lambda engine: False)
    run_spec = prepare(small(tmp_path, backend="ray", address="auto", workers=1), new_run_id(), tmp_path / "out")
    with exclusive(tmp_path / "out", LAUNCHER), pytest.raises(InUse, match="in use by process"):
        detached.detach(run_spec)
    assert run_spec.run_id not in detached.running()
    assert not (tmp_path / "out").exists()


# --- searches and studies ---------------------------------------------------------------------------------------------
def test_of_two_searches_in_one_folder_one_begins(tmp_path):
    from fedfleet.tune.search.folder import LOCK
    from fedfleet.tune.search.run import search

    data: dict[str, Any] = {**setting(tmp_path), "search": {"trials": 1}}
    data["method"]["rule"]["lr"] = {"search": "loguniform", "low": 0.01, "high": 0.1}
    with exclusive(tmp_path / "out", LOCK):
        before = content(tmp_path / "out")
        for again in (False, True):
            with pytest.raises(InUse):
                search(data, tmp_path / "out", resume=again)
        assert content(tmp_path / "out") == before


def test_a_study_that_is_refused_leaves_the_one_that_runs_alone(tmp_path):
    from fedfleet.engine.storage.lock import exclusive

    out = tmp_path / "out"
    with exclusive(out, ".study.lock"):
        (out / "cells").mkdir()
        (out / "cells" / "of the other").write_text("a result")
        before = content(out)
        done = invoke("study", "heterogeneity", "--out", str(out), "--rounds", "1")
        assert (done.exit_code, "in use by" in done.stderr) == (2, True), done.stderr
        assert content(out) == before


# --- the lock itself --------------------------------------------------------------------------------------------------
HOLDER = """
import sys, pathlib
from fedfleet.engine.storage.lock import Lock
lock = Lock(pathlib.Path(sys.argv[1]))
print(lock.take(), flush=True)
sys.stdin.read()
if sys.argv[2] == "release":
    lock.release()
"""


@pytest.mark.parametrize("way", ["release", "exit", "kill"])
def test_the_lock_is_free_once_its_holder_has_ended_in_any_way(way, tmp_path):
    path, pipe = tmp_path / "lock", subprocess.PIPE
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(path), way], stdin=pipe, stdout=pipe, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "True\n"
    lock = Lock(path)
    assert not lock.take()
    assert lock.holder() == f"process {holder.pid} on {os.uname().nodename}"
    if way == "kill":
        holder.kill()
    holder.communicate(timeout=300)
    assert lock.take()
    lock.release()
    assert not path.exists()


def test_a_child_of_a_fork_does_not_keep_its_parents_lock(tmp_path):
    lock = Lock(tmp_path / "lock")
    assert lock.take()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, b"1")  # the child has let go of its parent's locks before `fork` returned in it
        signal.pause()
    try:
        assert os.read(reading, 1) == b"1"
        lock._close()  # as when this process died
        assert Lock(tmp_path / "lock").take()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


RACER = """
import sys, pathlib, os
from fedfleet.engine.errors import InUse
from fedfleet.engine.storage.lock import exclusive
folder, count = pathlib.Path(sys.argv[1]), 0
while count < 300:
    try:
        with exclusive(folder, "lock"):
            mark = os.open(folder / "mark", os.O_CREAT | os.O_EXCL)
            count += 1
            os.close(mark)
            os.unlink(folder / "mark")
    except InUse:
        pass
print(count)
"""


def test_never_two_at_once_where_the_folder_comes_and_goes(tmp_path):
    """The holder of the lock makes a file that must not exist; the folder is removed together with the lock every
    time."""
    arguments = [sys.executable, "-c", RACER, str(tmp_path / "a" / "b")]
    racers = [subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    counts = [int(racer.communicate(timeout=300)[0]) for racer in racers]
    assert [racer.returncode for racer in racers] == [0] * 4
    assert counts == [300] * 4
    assert not content(tmp_path)


def test_a_folder_that_goes_while_it_is_made_is_made_again(tmp_path, monkeypatch):
    """Another process makes the folder just before this one does, and removes it just after."""
    folder, make = tmp_path / "a" / "b", Path.mkdir
    seen: list[Path] = []

    def mkdir(path: Path, *arguments: Any, **options: Any) -> None:
        seen.append(path)
        if len(seen) == 1:
            raise FileExistsError(errno.EEXIST, "File exists", str(path))
        make(path, *arguments, **options)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    with exclusive(folder, "lock"):
        assert folder.is_dir()
    assert seen == [tmp_path / "a", tmp_path / "a", folder]
    assert not content(tmp_path)
    assert not folder.parent.exists()


@pytest.mark.timeout(120)
def test_a_link_to_nothing_is_a_sentence(tmp_path):
    (tmp_path / "out").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="cannot be written to"), exclusive(tmp_path / "out", "lock"):
        pass


def test_a_file_system_without_locks_lets_the_run_go_and_says_so(tmp_path, monkeypatch, expected):
    import fcntl

    def none(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    same(run(small(tmp_path), tmp_path / "out"), expected)
    assert "has no locks" in (tmp_path / "out" / "run.log").read_text()


def test_a_folder_that_cannot_be_written_to_is_a_sentence(tmp_path):
    (tmp_path / "file").write_text("mine")
    for out in (tmp_path / "file", tmp_path / "file" / "deeper"):
        with pytest.raises(ConfigError, match="cannot be written to"):
            run(experiment(setting(tmp_path)), out)

"""Only plain files are used in a run's folder: links are not followed, and nothing waits for a FIFO or a socket."""

from __future__ import annotations

import os
import shutil
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from fedfleet.engine import run
from fedfleet.engine.api import resume
from fedfleet.engine.errors import ConfigError
from fedfleet.engine.runs.run_directory import log_line
from fedfleet.engine.runs.saved_files import FILES, FOLDERS
from fedfleet.engine.storage.atomic_write import RESERVE, reserve, temporary_path, write
from fedfleet.engine.storage.lock import DRIVER, LAUNCHER, Lock, exclusive

from ..tune.commands import error_in, invoke
from .runs import Watch, same, small

SECRET = "what must not be changed\n"


@pytest.fixture
def target(tmp_path) -> Path:
    path = tmp_path / "target"
    path.write_text(SECRET)
    return path


def link(path: Path, target: Path) -> None:
    path.symlink_to(target)


def fifo(path: Path, target: Path) -> None:
    os.mkfifo(path)


def listening(path: Path, target: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        here = os.open(path.parent, os.O_RDONLY)
        server.bind(f"/proc/self/fd/{here}/{path.name}")  # the path itself may be too long for a socket
        os.close(here)


def device(path: Path, target: Path) -> None:
    path.symlink_to("/dev/zero")


UNUSUAL: dict[str, Callable[[Path, Path], None]] = {"link": link, "FIFO": fifo, "socket": listening, "device": device}


@pytest.fixture(params=UNUSUAL)
def unusual(request, target) -> Callable[[Path], None]:
    """Puts something that is no plain file at a path."""
    return lambda path: UNUSUAL[request.param](path, target)


# --- single files -----------------------------------------------------------------------------------------------------
def test_a_lock_is_a_plain_file(unusual, target, tmp_path):
    unusual(tmp_path / "lock")
    with pytest.raises(OSError, match="where a plain file must be"):
        Lock(tmp_path / "lock").take()
    assert target.read_text() == SECRET


@pytest.mark.parametrize("name", [LAUNCHER, ".study.lock"])
def test_a_folder_whose_lock_is_no_file_is_refused(name, unusual, target, tmp_path):
    unusual(tmp_path / name)
    with pytest.raises(ConfigError, match="where a plain file must be"), exclusive(tmp_path, name):
        raise AssertionError("the lock was taken")
    assert target.read_text() == SECRET


def test_what_is_written_replaces_a_link(target, tmp_path):
    link(tmp_path / "page", target)
    link(temporary_path(tmp_path / "page"), target)
    write(tmp_path / "page", "new")
    assert target.read_text() == SECRET
    assert (tmp_path / "page").read_text() == "new"


def test_reserved_space_is_not_taken_from_the_target_of_a_link(target, tmp_path):
    link(tmp_path / RESERVE, target)
    reserve(tmp_path, 1000)
    assert target.read_text() == SECRET
    assert (tmp_path / RESERVE).stat().st_size == 1000


def test_lines_of_the_log_go_nowhere_else(unusual, target, tmp_path):
    unusual(tmp_path / "run.log")
    log_line(tmp_path, "a line")
    assert target.read_text() == SECRET


# --- commands ---------------------------------------------------------------------------------------------------------
INSIDE = ["checkpoints/round-000004.json", "state/rows00.bin"]
PLACES = [*FILES, *(f".{name}" for name in FILES), *FOLDERS, *INSIDE, RESERVE, LAUNCHER, DRIVER]
NEEDED = {"config.yaml", "run.json"}  # a folder without these holds no run


@pytest.mark.parametrize("name", PLACES)
def test_no_run_is_resumed_where_something_is_no_plain_file(name, unusual, target, out):
    place = out / name
    if place.is_dir():
        shutil.rmtree(place)
    else:
        place.unlink(missing_ok=True)
    unusual(place)
    before = sorted(out.rglob("*"))
    done = invoke("resume", str(out))
    assert done.exit_code == 2, done.output
    assert error_in(done.stderr).startswith("error: ")
    assert name in done.stderr or (name in NEEDED and "holds no run" in done.stderr)
    assert target.read_text() == SECRET
    assert sorted(out.rglob("*")) == before


def test_it_goes_on_when_the_file_is_back(out, broken_off, target):
    (out / "run.log").rename(out.parent / "log")
    link(out / "run.log", target)
    with pytest.raises(ConfigError, match=r"run\.log is a symbolic link"):
        resume(out)
    (out / "run.log").unlink()
    same(resume(out), resume(broken_off))


@pytest.mark.parametrize("name", ["config.yaml", "rounds.parquet", "result.json", "run.log", "fork.json"])
@pytest.mark.parametrize("command", ["report", "compare", "show"])
def test_reports_do_not_read_it(command, name, unusual, out, target):
    (out / name).unlink(missing_ok=True)
    unusual(out / name)
    done = invoke(command, str(out))  # it ends: with a page without this file, or with a sentence
    assert done.exit_code in (0, 2), done.output
    assert "what must not be changed" not in done.output


# --- who can read rows ------------------------------------------------------------------------------------------------
def test_rows_of_clients_are_for_this_user_alone(tmp_path):
    """Also in a folder of all users, such as /dev/shm, and whatever the umask is."""
    found: set[int] = set()

    def look(*_) -> None:
        (folder,) = (tmp_path / "store").iterdir()
        found.update(stat.S_IMODE(path.stat().st_mode) & 0o077 for path in (folder, *folder.iterdir()))

    before = os.umask(0)
    try:
        run(small(tmp_path, store=str(tmp_path / "store")), None, [Watch(r2=look)])
    finally:
        os.umask(before)
    assert found == {0}

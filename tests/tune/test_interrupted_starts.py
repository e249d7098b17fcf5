"""After Ctrl-C before the first round, a command ends with one line and status 130, and leaves no process."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from fedfleet.engine.errors import Interrupted
from fedfleet.engine.stopping import Stop, stopping

from .commands import error_in, kill, until

READY = "import fedfleet.tune.main as command; command.arm(); print('ready', flush=True); command.main()"
"""The command, which prints a line when its handler is set. Before that, Python itself is starting."""
SECONDS = 120
"""Seconds in which it must have ended, on a machine with much other work. By itself it would go on for hours."""


def begun(folder: Path, backend: str) -> subprocess.Popen[str]:
    rest = ["federation.rounds=1000000", "evaluate.every=0", "engine.workers=1", "engine.cpus=0.5", "--out", "mine"]
    return ready(folder, "run", "digits", f"engine.backend={backend}", *rest)


def ready(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", READY, *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def interrupted(process: subprocess.Popen[str]) -> str:
    """Standard error of a process whose whole group gets Ctrl-C at once."""
    family = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGINT)
    try:
        _, stderr = process.communicate(timeout=SECONDS)
    finally:
        process.kill()
    assert process.returncode == 130, (process.returncode, stderr)
    _, alive = psutil.wait_procs(family, timeout=120)
    assert not [each for each in alive if "raylet" in each.name() or "ray::" in each.name()]
    kill(alive)
    return stderr


def check(process: subprocess.Popen[str]) -> None:
    stderr = interrupted(process)
    assert error_in(stderr).startswith("interrupted"), stderr


@pytest.mark.parametrize("seed", [pytest.param(n, marks=pytest.mark.slow if n % 2 == 0 else ()) for n in range(8)])
def test_at_any_moment_of_the_first_seconds(seed, tmp_path):
    """The moment is drawn at random; it may be during imports, the configuration, the data, the trial step or the first
    rounds."""
    process = begun(tmp_path, "local")
    time.sleep(random.Random(seed).uniform(0, 5))
    check(process)


def log(folder: Path) -> bool:
    return (folder / "mine" / "run.log").is_file()


def below(process: subprocess.Popen[str], name: str) -> psutil.Process | None:
    for each in psutil.Process(process.pid).children(recursive=True):
        with suppress(psutil.Error):
            if name in " ".join(each.cmdline()[:1]):
                return each
    return None


def frozen(process: subprocess.Popen[str], name: str) -> bool:
    """Whether there is such a process, which then does nothing any more, as on a machine that has no memory left."""
    found = below(process, name)
    if found is not None:
        found.suspend()
    return found is not None


STAGES: dict[str, Callable[[subprocess.Popen[str], Path], object]] = {
    "before Ray": lambda process, folder: log(folder),
    "Ray's first process": lambda process, folder: below(process, "gcs_server"),
    "Ray's first process, frozen": lambda process, folder: frozen(process, "gcs_server"),
    "Ray's node": lambda process, folder: below(process, "raylet"),
    "a worker": lambda process, folder: below(process, "ray::"),
    "the driver": lambda process, folder: below(process, "ray::DriverProcess"),
}


@pytest.mark.long
@pytest.mark.parametrize("stage", STAGES)
def test_while_ray_starts(stage, tmp_path):
    process = begun(tmp_path, "ray")
    until(lambda: process.poll() is not None or STAGES[stage](process, tmp_path), stage)
    check(process)


SEARCH = """
workload: quadratic
method: {name: fedavg, rule: {name: sgd, lr: {search: loguniform, low: 0.01, high: 0.1}}}
federation: {clients: 4, cohort: 2, rounds: 2}
search: {trials: 1, workers: 1, objectives: {eval/loss: min}}
tracking: {uri: none}
"""


@pytest.mark.long
def test_while_the_ray_of_a_search_starts(tmp_path):
    """A signal only sets a flag there; the search says how it goes on."""
    (tmp_path / "search.yaml").write_text(SEARCH)
    process = ready(tmp_path, "search", "search.yaml", "--out", "mine")
    until(lambda: process.poll() is not None or frozen(process, "gcs_server"), "Ray's first process", 120)
    assert re.search(r"interrupted; 0 of 1 trials have ended; to go on: fedfleet search --resume", interrupted(process))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_signal_that_is_lost_in_a_destructor_comes_again():
    """The interpreter prints an exception in a destructor and then ignores it."""

    class Lost:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)  # the interpreter calls the handler here

    def waits() -> None:
        Lost()
        threading.Event().wait(30)

    ended_at_once(waits)


def test_a_signal_that_came_before_ends_it_too():
    with stopping() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        until(stop, "the signal")
        assert isinstance(stop, Stop)
        with pytest.raises(Interrupted), stop.at_once():
            raise AssertionError("begins although it was asked to end")


def ended_at_once(act: Callable[[], None]) -> None:
    with stopping() as stop:
        assert isinstance(stop, Stop)
        with pytest.raises(Interrupted), stop.at_once():
            act()

"""Running the command line: in this process, or as a user's shell does."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import psutil
from click.testing import CliRunner, Result

from fedfleet.tune.cli import main

LOCAL = ("engine.backend=local", "tracking.uri=none", "federation.rounds=2")
HANGS = 300
"""Seconds after which something hangs. Limits are for that, on a machine with much other work, and measure nothing."""
COMMAND = (sys.executable, "-m", "fedfleet.tune.cli")

T = TypeVar("T")


def invoke(*args: str) -> Result:
    return CliRunner().invoke(main, args)


def shell(folder: Path, *args: str, timeout: float = HANGS) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *args], cwd=folder, capture_output=True, text=True, timeout=timeout)


def error_in(stderr: str) -> str:
    """The line of an error. It stands alone, or below the line that says what is run if the run had begun."""
    *before, line = stderr.splitlines()
    assert len(before) <= 1, stderr
    assert all(re.fullmatch(r"\w+ on \w+: \d+ clients, .*", each) for each in before), stderr
    return line


def until(found: Callable[[], T | None], what: str, seconds: float = HANGS) -> T:
    """Call `found` until its answer is true, and return the answer; an error after so many seconds. what: for the
    message."""
    deadline = time.monotonic() + seconds
    while not (answer := found()):
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(0.02)
    return answer


def living(numbers: Iterable[int]) -> list[psutil.Process]:
    """The processes with these numbers that have not ended yet."""
    found = []
    for number in numbers:
        with suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(number))
    return found


def below(process: subprocess.Popen[str]) -> dict[psutil.Process, str]:
    """The processes that a process has started, and they in turn, with their command lines."""
    found = {}
    for each in psutil.Process(process.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            found[each] = " ".join(each.cmdline())
    return found


def kill(processes: Sequence[psutil.Process]) -> None:
    """Kill processes, of which some may have ended meanwhile, and wait for the end of all."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=HANGS)

"""Running the command line: in this process, or as a user's shell does."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from click.testing import CliRunner, Result

from fedfleet.tune.cli import main

LOCAL = ("engine.backend=local", "tracking.uri=none", "federation.rounds=2")
COMMAND = (sys.executable, "-m", "fedfleet.tune.cli")

T = TypeVar("T")


def invoke(*args: str) -> Result:
    return CliRunner().invoke(main, args)


def shell(folder: Path, *args: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *args], cwd=folder, capture_output=True, text=True, timeout=timeout)


def error_in(stderr: str) -> str:
    """The line of an error. It stands alone, or below the line that says what is run if the run had begun."""
    *before, line = stderr.splitlines()
    assert len(before) <= 1, stderr
    assert all(re.fullmatch(r"\w+ on \w+: \d+ clients, .*", each) for each in before), stderr
    return line


def until(found: Callable[[], T | None], what: str, seconds: float = 60) -> T:
    """Call `found` until its answer is true, and return the answer; an error after so many seconds. what: for the
    message."""
    deadline = time.monotonic() + seconds
    while not (answer := found()):
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(0.02)
    return answer

"""Executes the tutorial on clusters as it is printed, in a home where Ray was never started, and in one where a run has
left Ray's token."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from ..pages import DOCS, blocks
from ..tune.commands import kill
from .test_head import ports

PAGE = DOCS / "tutorials/cluster.md"
PORT = "6399"
"""The port of the tutorial. A free one stands for it, since others may use this machine."""
FIRST = "fedfleet run digits federation.rounds=1 engine.backend=ray engine.workers=1 tracking.uri=none"
OF_CPP = re.compile(r"^\[[-\d: ,]+ [WEF] \d", re.MULTILINE)
"""The beginning of a warning or an error that code of Ray in C++ prints."""


@pytest.fixture
def home() -> Iterator[Path]:
    """A folder with a short path, in which Ray makes sockets. Its clusters end with the test."""
    folder = Path(tempfile.mkdtemp(prefix="ff-home-"))
    yield folder
    kill(processes_of(folder))
    shutil.rmtree(folder, ignore_errors=True)


def processes_of(folder: Path) -> list[psutil.Process]:
    """The processes of Ray whose files are in a folder. `ray stop` would end those of others too."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if any(str(folder) in word for word in process.cmdline()):
                found.append(process)
    return found


@pytest.mark.parametrize(
    "first",
    [
        pytest.param([], id="in a clean home"),
        pytest.param([FIRST], id="after a first run", marks=pytest.mark.slow),
    ],
)
def test_as_printed(first: list[str], home: Path):
    port, token = str(ports(1)[0]), home / ".ray" / "auth_token"
    for line in first:
        execute(line, home)
    assert token.exists() == bool(first)
    commands, done = 0, ""
    for block in blocks(PAGE):
        text = block.text.replace(PORT, port)
        if block.language == "python":
            (home / "block.py").write_text(text)
            execute("python block.py", home)
        for line in text.splitlines() if block.language == "console" and not block.not_run else ():
            assert line.startswith("$ "), block.text
            done, commands = done + execute(line[2:], home), commands + 1
    assert commands == 6
    assert ("authentication: by token" in done) == bool(first)
    assert token.exists() == bool(first)


def execute(line: str, home: Path) -> str:
    """Execute a command of a shell in a home folder, whose name is short. Returns standard output."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "FEDFLEET_"))}
    env |= {"HOME": str(home), "RAY_TMPDIR": f"{home}/r", "RAY_raylet_start_wait_time_s": "120"}
    env |= {"PATH": f"{Path(sys.executable).parent}:{env['PATH']}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(line, shell=True, cwd=home, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
    if line.startswith("fedfleet"):
        assert not OF_CPP.search(done.stdout + done.stderr), f"{line}\n{done.stdout}\n{done.stderr}"
    return done.stdout

"""Standard streams that are closed, full, or that nobody reads: a run goes on, and its files are whole."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fedfleet.tune.streams import replace_unknown, say

from .commands import COMMAND, invoke

RUN = ("run", "digits", "federation.rounds=2", "engine.backend=local", "tracking.uri=none", "--out", "out")


def shell(folder: Path, ending: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command by sh, with this text behind it."""
    line = f"{' '.join([*COMMAND, *arguments])} {ending}"
    return subprocess.run(["sh", "-c", line], cwd=folder, capture_output=True, text=True, timeout=300)


def finished(folder: Path) -> bool:
    return json.loads((folder / "out" / "result.json").read_text())["rounds"] == 2


@pytest.mark.parametrize(
    "ending",
    ["<&- >&- 2>&-", "2>/dev/full", *(pytest.param(one, marks=pytest.mark.long) for one in ("2>&-", ">&-"))],
)
def test_a_run_needs_no_streams(ending, tmp_path):
    """No message gets into a file of the run: files that are opened later do not get the numbers of closed streams."""
    done = shell(tmp_path, ending, *RUN)
    assert done.returncode == 0, done.stderr
    assert finished(tmp_path)
    assert "Traceback" not in done.stderr
    assert not any(b"scaffold on digits: " in path.read_bytes() for path in (tmp_path / "out").rglob("*.*"))


@pytest.mark.parametrize(("encoding", "shown"), [("ascii", b"1 ? 0, ?\n"), ("latin-1", b"1 \xb1 0, ?\n")])
def test_an_encoding_that_lacks_a_character(encoding, shown, monkeypatch):
    """Tables have such characters."""
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding=encoding))
    replace_unknown()
    say("1 ± 0, –")
    assert written.getvalue() == shown


def test_a_command_in_such_an_encoding(tmp_path):
    """The usage of a command has an ellipsis."""
    told = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    done = subprocess.run([*COMMAND, "study", "--help"], cwd=tmp_path, env=told, capture_output=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"[a.b=c ?]" in done.stdout


def test_a_full_standard_output_is_told(tmp_path):
    done = shell(tmp_path, ">/dev/full", *RUN)
    assert done.returncode == 1
    assert "error: standard output cannot be written to (No space left on device); what the command" in done.stderr
    assert finished(tmp_path)


@pytest.mark.parametrize("arguments", [("list", "methods"), ("show", "digits", "--all")], ids=" ".join)
def test_a_reader_that_has_ended(arguments, tmp_path):
    """As in `fedfleet list methods | head -1`, but with a reader that is certain to have ended."""
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [*COMMAND, *arguments], cwd=tmp_path, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=300
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


def test_progress_that_nobody_reads(tmp_path):
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [*COMMAND, *RUN], cwd=tmp_path, stdout=subprocess.PIPE, stderr=writing, text=True, timeout=300
    )
    os.close(writing)
    assert done.returncode == 0
    assert "2 rounds in" in done.stdout
    assert finished(tmp_path)


# --- the code of a user that ends the process ------------------------------------------------------------------------
WHERE = {
    "when it is imported": "import sys\nsys.exit(0)\n",
    "when a part is built": "import sys\nWORKLOADS = {'exiting': lambda: sys.exit(0)}\n",
    "when data are read": """
import sys
from dataclasses import dataclass
from fedfleet.workloads.data.digits import Digits

@dataclass(frozen=True)
class Exiting(Digits):
    def load(self):
        sys.exit(0)

WORKLOADS = {"exiting": Exiting}
""",
    "in the loss": """
import sys
from dataclasses import dataclass
from fedfleet.workloads.data.digits import Digits

@dataclass(frozen=True)
class Exiting(Digits):
    def losses(self, x, batch):
        sys.exit(0)

WORKLOADS = {"exiting": Exiting}
""",
}


@pytest.mark.parametrize("where", WHERE)
def test_a_plugin_that_calls_exit(where, here):
    """Status 0 without a word would look like a run that has ended well."""
    (here / "mine.py").write_text(WHERE[where])
    done = invoke(*RUN, "plugins=mine.py", "workload=exiting")
    check_told(done.exit_code, done.stderr)


def test_a_plugin_that_calls_exit_in_a_process_of_its_own(tmp_path):
    (tmp_path / "mine.py").write_text(WHERE["in the loss"])
    done = shell(tmp_path, "", *RUN, "plugins=mine.py", "workload=exiting")
    check_told(done.returncode, done.stderr)


def check_told(status, stderr):
    assert status in (1, 2), stderr
    assert "SystemExit: 0" in stderr
    assert "mine.py" in stderr
    assert "Traceback" not in stderr

"""What the command says on Windows, and the code paths of macOS, as far as Linux can take them: see
`tests/macos/sitecustomize.py`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
SETTINGS: dict[str, Any] = {
    "workload": {"name": "digits", "model": {"name": "mlp", "hidden": [8]}},
    "method": {"name": "scaffold", "rule": {"name": "sgd", "lr": 0.1}},
    "federation": {"clients": 12, "cohort": 4, "rounds": 4, "local": {"steps": 2, "batch": 8}},
    "engine": {"backend": "local", "block": 2, "kernels": "torch", "keep_state": True},
    "checkpoint": {"every": 2},
    "tracking": {"uri": "none"},
}
RUNS = """
import json, sys
from pathlib import Path

import fedfleet

settings = json.loads(sys.argv[1])
robust = {**settings, "method": "fedavg", "aggregate": {"name": "krum", "f": 1}}
states = fedfleet.run(fedfleet.Experiment(**settings), "states", progress=False)
messages = fedfleet.run(fedfleet.Experiment(**robust), "messages", progress=False)
again = fedfleet.fork("states", 2, out="forked").model_sha256
print(json.dumps([sys.platform, states.model_sha256, again, messages.model_sha256]))
"""
ONE_ROUND = """
import json, sys
import fedfleet

for record in fedfleet.rounds(fedfleet.Experiment(**json.loads(sys.argv[1])), "run"):
    break
"""
IMPORTS = """
import pkgutil, importlib, sys
import fedfleet

for folder in ("algorithms", "workloads", "engine", "tune"):
    package = importlib.import_module(f"fedfleet.{folder}")
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)
print(sys.platform)
"""


def printed(folder: Path, *command: str, macos: bool = True, **variables: str) -> str:
    """What a Python writes to standard output, on macOS or on Linux."""
    env = {**os.environ, "PYTHONPATH": str(HERE / "macos") if macos else "", **variables}
    folder.mkdir(exist_ok=True)
    done = subprocess.run([sys.executable, *command], cwd=folder, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long
def test_every_module_is_imported(tmp_path: Path):
    assert printed(tmp_path, "-c", IMPORTS) == "darwin\n"


@pytest.mark.long
def test_runs_in_process_have_the_same_bits(tmp_path: Path):
    """With rows of client states and of messages, a checkpoint, and a fork that resumes from it."""
    given = ["-c", RUNS, json.dumps(SETTINGS)]
    linux, *expected = json.loads(printed(tmp_path / "linux", *given, macos=False).splitlines()[-1])
    darwin, *found = json.loads(printed(tmp_path / "darwin", *given).splitlines()[-1])
    assert (linux, darwin) == ("linux", "darwin")
    assert found == expected
    assert found[0] == found[1]


@pytest.mark.long
def test_a_search_begins_processes_anew(tmp_path: Path):
    rule = {"name": "sgd", "lr": {"search": "grid", "values": [0.1]}}
    settings = {**SETTINGS, "checkpoint": {}, "method": {"name": "fedavg", "rule": rule}}
    (tmp_path / "search.yaml").write_text(json.dumps(settings))  # JSON is YAML
    printed(tmp_path, "-m", "fedfleet", "search", "search.yaml", "--out", "found")
    assert (tmp_path / "found" / "best.yaml").is_file()


@pytest.mark.long
def test_a_run_says_why_it_has_no_compiled_kernels(tmp_path: Path):
    settings = {**SETTINGS, "engine": {"backend": "local"}, "federation": {**SETTINGS["federation"], "rounds": 10_000}}
    printed(tmp_path, "-c", ONE_ROUND, json.dumps(settings), CXX="/no/such/compiler")
    (line,) = [line for line in (tmp_path / "run/run.log").read_text().splitlines() if " plan: " in line]
    assert "torch kernels (measured" in line
    assert "no compiled kernels, which not every machine can have: no C++ compiler" in line


def test_the_command_says_that_it_does_not_run_on_windows():
    script = "import sys; sys.platform = 'win32'; from fedfleet.tune.main import main; main()"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: FedFleet runs on Linux and macOS, got Windows; install WSL 2 and work in its Linux\n"

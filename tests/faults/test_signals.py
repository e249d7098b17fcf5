"""Signals as batch systems, terminals and container runtimes send them: to the command alone, to its group, or to all
processes of the job, once or several times. Each leaves a checkpoint and nothing else, and the resumed run has the bits
of one that was never interrupted."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
import yaml

from fedfleet.engine import Result, resume

from ..tune.commands import COMMAND, until
from .runs import plan, rule, same, setting, small, visitor

ROUND = 4
"""The round in the middle of which the signals come."""

Family = list[psutil.Process]


def alone(family: Family, number: int) -> None:
    send(family[:1], number)


def group(family: Family, number: int) -> None:
    os.killpg(family[0].pid, number)


def everyone(family: Family, number: int) -> None:
    send(family, number)


def the_command_last(family: Family, number: int) -> None:
    send(family[::-1], number)


def send(processes: Sequence[psutil.Process], number: int) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


@contextmanager
def started(folder: Path, *command: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        command,
        cwd=folder,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def gate(folder: Path, number: int = ROUND) -> None:
    """Have a client wait at its second local step of a round, until `open-0` is there."""
    client, before = visitor(number)
    plan(folder, rule(client, "gate", before + 1, 1))


def signalled(
    process: subprocess.Popen[str],
    folder: Path,
    whom: Callable[[Family, int], None],
    number: int,
    times: int = 1,
    backend: str = "local",
) -> tuple[str, str]:
    """Send a signal so many times when the run is at its gate; returns the outputs. Nothing may be left of it.

    A worker of Ray stays at its gate. A run in one process ends after the local step.
    """
    until(lambda: process.poll() is not None or (folder / "at-0").exists(), "the run at its gate", 180)
    assert process.poll() is None, process.communicate()
    own = psutil.Process(process.pid)
    family = [own, *own.children(recursive=True)]
    whom(family, number)
    if backend == "local":
        (folder / "open-0").touch()
    for _ in range(times - 1):  # the next one comes while the command ends
        until(lambda: process.poll() is not None or any(checkpoints(folder / "out")), "the checkpoint")
        if process.poll() is None:
            whom(family, number)
    outputs = process.communicate(timeout=60)
    assert not psutil.wait_procs(family, timeout=20)[1]
    return outputs


def checkpoints(out: Path) -> list[str]:
    return [path.name for path in (out / "checkpoints").glob("round-*")]


class Case(NamedTuple):
    number: signal.Signals
    whom: Callable[[Family, int], None]
    times: int = 1
    every: int = 0
    mark: str = "long"


CASES = {
    "local": [
        Case(signal.SIGTERM, group, 2),
        Case(signal.SIGINT, alone, 3),
        Case(signal.SIGHUP, group, 1, every=3),
    ],
    "ray": [
        Case(signal.SIGTERM, everyone, 1, mark="slow"),
        Case(signal.SIGTERM, the_command_last, 2, every=2),
        Case(signal.SIGINT, everyone, 2),
        Case(signal.SIGHUP, everyone, 1, mark="slow"),
        Case(signal.SIGUSR1, group, 2, every=3),
    ],
}


@pytest.mark.parametrize(
    ("backend", "case"),
    [
        pytest.param(
            backend,
            case,
            id=f"{backend}-{case.number.name}-{case.whom.__name__}-{case.times}-{case.every}",
            marks=getattr(pytest.mark, case.mark) if backend == "ray" else (),
        )
        for backend, cases in CASES.items()
        for case in cases
    ],
)
def test_a_command(backend: str, case: Case, tmp_path: Path, expected: Result):
    checkpoint = {"every": case.every} if case.every else None
    data = setting(tmp_path, backend=backend, workers=2, checkpoint=checkpoint)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(data))
    gate(tmp_path)
    with started(tmp_path, *COMMAND, "run", "run.yaml", "--out", "out") as process:
        stdout, stderr = signalled(process, tmp_path, case.whom, case.number, case.times, backend)
    assert process.returncode == 128 + case.number, stderr
    assert stdout == ""
    last = f"interrupted; checkpoint after round {ROUND - 1}; to go on: fedfleet resume out"
    assert stderr.splitlines()[-1] == last
    assert not re.search("Traceback|Error", stderr)
    plan(tmp_path)
    go_on = small(tmp_path, checkpoint=checkpoint)
    same(resume(go_on, tmp_path / "out"), expected)


ROUNDS = """
import json
import sys
from pathlib import Path

import fedfleet

data = json.loads(Path("run.json").read_text())
for record in fedfleet.rounds(fedfleet.Experiment(**data), "out"):
    if record["round"] == 3:
        Path("at-0").touch()
        sys.stdin.read()  # a signal comes while the caller uses a round
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_loop_over_rounds(number: signal.Signals, tmp_path: Path, expected: Result):
    """Between two rounds a signal ends the caller's program, and the exit of the process leaves the checkpoint."""
    (tmp_path / "run.json").write_text(json.dumps(setting(tmp_path)))
    with started(tmp_path, sys.executable, "-c", ROUNDS) as process:
        signalled(process, tmp_path, group, number)
    assert process.returncode == 128 + number
    same(resume(small(tmp_path), tmp_path / "out"), expected)

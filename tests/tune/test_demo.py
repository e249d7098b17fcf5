"""`make demo`: the study `demo`, whose four runs share processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedfleet import run
from fedfleet.engine.config.schema import experiment
from fedfleet.tune import demo
from fedfleet.tune.executor.processes import Processes
from fedfleet.tune.executor.source import Source
from fedfleet.tune.study.folder import StudyFolder
from fedfleet.tune.study.spec import load

from .commands import until


def test_the_runs_share_processes_and_have_the_bits_of_runs_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    short = load("demo", ("experiment.federation.rounds=10", "tune.together=true", "experiment.engine.block=4"))
    monkeypatch.setattr(demo, "load", lambda name: short)
    handed_out: list[Source[Any]] = []
    execute = Processes.run

    def counted(self: Processes, source: Source[Any], stop: Callable[[], Any]) -> None:
        handed_out.append(source)
        execute(self, source, stop)

    monkeypatch.setattr(Processes, "run", counted)
    demo.demo()
    assert len(handed_out) == 1
    shown = capsys.readouterr().out
    (path,) = tmp_path.glob("runs/demo-*")
    folder = StudyFolder(path)
    assert (path / "accuracy.png").stat().st_size > 10_000
    assert str(path.relative_to(tmp_path) / "report.html") in shown
    for cell in folder.cells():
        kept = folder.result(cell)
        assert run(experiment(cell.data)).model_sha256 == kept["model_sha256"]
        assert re.search(rf"^{cell.method} +{100 * kept['metrics']['eval/accuracy']:.1f}$", shown, re.MULTILINE)


def test_ctrl_c_says_how_to_go_on(tmp_path: Path):
    process = subprocess.Popen(
        [sys.executable, "-m", "fedfleet.tune.demo"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    until(lambda: list(tmp_path.glob("runs/demo-*/cells/*/run.log")), "a run that has begun")
    os.killpg(process.pid, signal.SIGINT)
    _, stderr = process.communicate(timeout=300)
    (path,) = tmp_path.glob("runs/demo-*")
    assert process.returncode == 130
    assert stderr.endswith(f"interrupted; to go on: fedfleet study demo --out {path.relative_to(tmp_path)}\n")
    assert "Traceback" not in stderr

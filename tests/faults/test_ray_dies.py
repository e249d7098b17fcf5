"""A part of Ray is killed under a run: one sentence says what died, and the run goes on from a checkpoint."""

from __future__ import annotations

import re
from pathlib import Path

import psutil
import pytest
import yaml

from fedfleet.engine import Result, resume

from ..tune.commands import COMMAND, until
from .runs import plan, same, setting, small
from .test_signals import ROUND, gate, started

PARTS = {
    "gcs_server": r"Ray's head \(gcs_server\) has died, process \d+",
    "raylet": r"Ray's node \(raylet\) has died, process \d+",
    "ray::DriverProcess": r"the driver died.*",
}
"""What is killed -> what the message says."""


@pytest.mark.long
@pytest.mark.parametrize("part", PARTS)
def test_a_killed_part(part: str, tmp_path: Path, expected: Result):
    """Where Ray dies and the driver does not, the driver writes a checkpoint of the last round. No process is left."""
    checkpoint = {"every": ROUND - 1} if part == "ray::DriverProcess" else None
    (tmp_path / "run.yaml").write_text(
        yaml.safe_dump(setting(tmp_path, backend="ray", workers=1, checkpoint=checkpoint))
    )
    gate(tmp_path)
    with started(tmp_path, *COMMAND, "run", "run.yaml", "--out", "out") as process:
        until(lambda: process.poll() is not None or (tmp_path / "at-0").exists(), "the run at its gate", 180)
        assert process.poll() is None, process.communicate()
        if checkpoint:
            until((tmp_path / "out" / "checkpoints" / f"round-{ROUND - 1:06d}.json").exists, "the checkpoint")
        family = psutil.Process(process.pid).children(recursive=True)
        (victim,) = [each for each in family if part in each.cmdline()[0]]
        victim.kill()
        stdout, stderr = process.communicate(timeout=120)
    assert not psutil.wait_procs(family, timeout=20)[1]
    assert (process.returncode, stdout) == (1, ""), stderr
    how = f"; checkpoint after round {ROUND - 1}; to go on: fedfleet resume out"
    assert re.fullmatch(f"error: {PARTS[part]}{how}", stderr.splitlines()[-1]), stderr
    assert "Traceback" not in stderr
    plan(tmp_path)
    same(resume(small(tmp_path, checkpoint=checkpoint), tmp_path / "out"), expected)

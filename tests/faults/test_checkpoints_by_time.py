"""Checkpoints that are written because of the time, which is what a run that is killed goes on from."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from fedfleet.engine import run
from fedfleet.engine.api import resume
from fedfleet.engine.config.schema import Experiment, experiment
from fedfleet.engine.errors import ConfigError, Diverged
from fedfleet.engine.state import folders
from fedfleet.engine.state.checkpoint import checkpointed_rounds
from fedfleet.engine.state.folders import CHECKPOINT_SECONDS, checkpoint_seconds

from .runs import Watch, asynchronous, same, setting, small

EVERY_ROUND: dict[str, Any] = {"seconds": 1e-9}


def killed_in_round_5(data: dict[str, Any], out: str) -> None:
    """Run an experiment until its process kills itself; the function that a separate process executes."""
    run(experiment(data), out, [Watch(r4=lambda: os.kill(os.getpid(), signal.SIGKILL))])


@pytest.mark.parametrize("data_of", [setting, asynchronous], ids=["rounds", "asynchronous"])
def test_a_killed_run_goes_on(tmp_path: Path, data_of: Any):
    data, out = data_of(tmp_path / "none", checkpoint=EVERY_ROUND), tmp_path / "out"
    process = multiprocessing.get_context("spawn").Process(target=killed_in_round_5, args=(data, str(out)))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    # That of round 4 was perhaps being written when the process died, and that of round 3 was complete before it.
    assert checkpointed_rounds(out)[-1] in (3, 4)
    watch = Watch()
    same(resume(experiment(data), out, [watch]), run(experiment(data_of(tmp_path / "none"))))
    assert any("resumes after round" in line for line in watch.told)


def seconds(chosen: Experiment, folder: Path | None) -> float | None:
    return checkpoint_seconds(chosen.checkpoint, str(folder) if folder else None)


def test_the_default_is_ten_minutes(tmp_path: Path):
    assert seconds(small(tmp_path), tmp_path) == CHECKPOINT_SECONDS == 600
    assert seconds(small(tmp_path, checkpoint={"seconds": 5}), tmp_path) == 5
    assert seconds(small(tmp_path, checkpoint={"seconds": None}), tmp_path) is None
    assert seconds(small(tmp_path, checkpoint={"every": 100}), tmp_path) is None
    assert seconds(small(tmp_path), None) is None


def test_a_run_without_a_folder_has_no_checkpoints(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"checkpoint\.seconds: needs a folder for the run's files, got .*; give out"):
        run(small(tmp_path, checkpoint={"seconds": 5.0}))


def test_the_folder_of_the_states_may_be_made_by_the_run(tmp_path: Path):
    result = run(small(tmp_path / "none", rounds=2, store=str(tmp_path / "new" / "store")), tmp_path / "out")
    assert len(result.rows) == 2


@pytest.mark.parametrize(("size", "some"), [(240, False), (480, True)], ids=["from the beginning", "later"])
def test_the_default_is_given_up_when_the_disk_gets_short(tmp_path: Path, disk, monkeypatch, size: int, some: bool):
    """The states of all clients and of a round take less than 240 KiB, those that checkpoints keep three times as much
    after twelve rounds."""
    monkeypatch.setattr(folders, "CHECKPOINT_SECONDS", 1e-9)
    out, seen = tmp_path / "out", []
    look = lambda: seen.append(len(checkpointed_rounds(out)))  # noqa: E731
    watch = Watch(r2=look, r11=look)
    chosen = small(tmp_path / "none", rounds=12, store=str(disk(size)))
    same(run(chosen, out, [watch]), run(small(tmp_path / "none", rounds=12)))
    assert seen == [int(some), 0]
    assert sum("no more checkpoints are written because of the time" in line for line in watch.told) == 1


def test_a_run_that_diverges_keeps_no_states_that_nobody_asked_for(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(folders, "CHECKPOINT_SECONDS", 1e-9)
    data = setting(tmp_path / "none", rounds=60)
    data |= {"workload": "quadratic", "method": {"name": "scaffold", "rule": {"name": "sgd", "lr": 3.0}}}
    counts: list[int] = []
    count = Watch(r2=lambda: counts.append(len(checkpointed_rounds(tmp_path / "out"))))
    with pytest.raises(Diverged):
        run(experiment(data), tmp_path / "out", [count])
    assert counts == [1]
    assert not (tmp_path / "out" / "checkpoints").exists()
    assert not (tmp_path / "out" / "state").exists()

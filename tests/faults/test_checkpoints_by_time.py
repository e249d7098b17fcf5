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
from fedfleet.engine.config.run_spec import RunSpec
from fedfleet.engine.config.schema import Experiment, experiment
from fedfleet.engine.errors import ConfigError
from fedfleet.engine.methods.state_spec import StateSpec
from fedfleet.engine.state.checkpoint import written
from fedfleet.engine.state.retention import CHECKPOINT_SECONDS, checkpoint_seconds

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
    assert written(str(out))[-1].name in ("round-000003", "round-000004")
    watch = Watch()
    same(resume(experiment(data), out, [watch]), run(experiment(data_of(tmp_path / "none"))))
    assert any("resumes after round" in line for line in watch.told)


def seconds(chosen: Experiment, folder: Path | None) -> float | None:
    run_spec = RunSpec.of("run", chosen, str(folder) if folder else None)
    return checkpoint_seconds(run_spec, StateSpec(run_spec.method(), run_spec.initial_model()))


def test_the_default_is_ten_minutes_where_the_disk_has_room(tmp_path: Path):
    assert seconds(small(tmp_path), tmp_path) == CHECKPOINT_SECONDS == 600
    assert seconds(small(tmp_path, checkpoint={"seconds": 5}), tmp_path) == 5
    assert seconds(small(tmp_path, checkpoint={"seconds": None}), tmp_path) is None
    assert seconds(small(tmp_path, checkpoint={"every": 100}), tmp_path) is None
    assert seconds(small(tmp_path), None) is None


def test_client_states_larger_than_the_disk_are_not_kept_twice(tmp_path: Path):
    """A million clients with a control variate of a hidden layer of 100,000 units have 30 TB of states."""
    data = setting(tmp_path)
    data["federation"]["clients"] = 10**6
    data["workload"]["model"]["hidden"] = [100_000]
    assert seconds(experiment(data), tmp_path) is None
    assert seconds(experiment({**data, "checkpoint": {"seconds": 60}}), tmp_path) == 60


def test_a_run_without_a_folder_has_no_checkpoints(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"checkpoint\.seconds needs a folder for the run's files; give out"):
        run(small(tmp_path, checkpoint={"seconds": 5.0}))

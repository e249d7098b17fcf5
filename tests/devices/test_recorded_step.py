"""Recorded local steps change no bit, whatever the method, and are not used where they would."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from fedfleet.algorithms.table import METHODS
from fedfleet.engine.api import run
from fedfleet.engine.clients import worker
from fedfleet.engine.clients.recorded_step import MOST, StepRecorder
from fedfleet.engine.config.run_spec import RunSpec

from ..faults.runs import Watch, same
from ..test_conformance import Few, few
from .tape import record_on_tape


@pytest.fixture
def recorders(monkeypatch):
    """Every trainer's, in the order in which they are made."""
    made: list[StepRecorder] = []

    def recorder() -> StepRecorder:
        made.append(StepRecorder(record_on_tape))
        return made[-1]

    monkeypatch.setattr(worker, "StepRecorder", recorder)
    return made


def graphs(method: str, workload: Any = None, **sections: Any) -> Any:
    """A run on the processor that records its steps; `engine.kernels` refuses this for users."""
    made = few(method, workload, 3, **sections)
    return made.model_copy(update={"engine": made.engine.model_copy(update={"kernels": "graph"})})


@pytest.fixture(autouse=True)
def on_the_processor(monkeypatch):
    monkeypatch.setattr("fedfleet.engine.runs.launch.check_device", lambda run_spec: None)


SHORT = ("fedavg", "scaffold", "fedavg_vr", "fedmuon_bc", "diloco", "stem", "fedbat", "ef21_p")
"""Methods of all kinds. `make test-long` has the others, too."""


@pytest.mark.parametrize(
    "method", [pytest.param(name, marks=[] if name in SHORT else [pytest.mark.long]) for name in METHODS]
)
def test_replays_change_no_bit(method, recorders):
    """Clients of unequal steps and short batches, over rounds in which every input differs."""
    found = run(graphs(method))
    same(found, run(few(method, rounds=3)))
    assert recorders
    assert not any(recorder.refused for recorder in recorders)
    assert sum(len(recorder.kept) for recorder in recorders) > 0
    assert all(len(recorder.kept) <= MOST for recorder in recorders)


@dataclass(frozen=True)
class Unrecordable(Few):
    def losses(self, p, batch):
        if torch.utils._python_dispatch._get_current_dispatch_mode() is not None:
            raise RuntimeError("operation not permitted when stream is capturing")
        return super().losses(p, batch)


def test_a_step_that_cannot_be_recorded_runs_as_it_is(recorders):
    watch = Watch()
    same(run(graphs("scaffold", Unrecordable()), observers=[watch]), run(few("scaffold", rounds=3)))
    told = [text for text in watch.told if "replayed" in text]
    assert told == [
        "round 1: local steps run one by one, they cannot be replayed "
        "(RuntimeError: operation not permitted when stream is capturing)"
    ]


def test_a_replay_that_differs_is_refused():
    recorder = StepRecorder(record_on_tape)
    calls: list[int] = []

    def step(inputs: Any, local: Any) -> Any:
        calls.append(1)
        return pytree.tree_map(lambda leaf: leaf * len(calls), local)

    assert recorder.recording(step, torch.ones(2), torch.ones(3)) is None
    assert recorder.refused == "Differs: a replay gave other bits than the step"
    assert recorder.recording(lambda inputs, local: local, torch.ones(2), torch.ones(3)) is None


def test_memory_that_runs_out_is_no_reason_to_refuse():
    def full(call: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    recorder = StepRecorder(full)
    with pytest.raises(torch.OutOfMemoryError):
        recorder.recording(lambda inputs, local: local, torch.ones(2), torch.ones(3))
    assert recorder.refused == ""


def test_old_recordings_are_dropped():
    recorder = StepRecorder(record_on_tape)
    for size in range(1, MOST + 3):
        assert recorder.recording(lambda inputs, local: local + inputs, torch.ones(size), torch.ones(size)) is not None
    assert len(recorder.kept) == MOST


def test_a_schedule_makes_new_recordings(recorders):
    schedule = {"name": "fedavg", "rule": {"name": "sgd", "lr": {"schedule": "cosine", "start": 0.1, "end": 0.01}}}
    changed, plain = (
        made.model_copy(update={"method": schedule}) for made in (graphs("fedavg"), few("fedavg", rounds=3))
    )
    same(run(changed), run(plain))
    assert len(recorders) == 3
    assert RunSpec.of("run", changed).method_has_schedule

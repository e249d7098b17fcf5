"""The clients of a block beside each other: each is computed as it is alone, and what they share is waited for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.func import vmap

from fedfleet.engine.api import run
from fedfleet.engine.kernels import recorded_visit, streams
from fedfleet.engine.kernels.recorded_visit import PROVEN_ROUNDS, VisitRecorder
from fedfleet.engine.kernels.streams import STREAMS, Streams, beside
from fedfleet.engine.planning.execution_plan import plan_execution
from fedfleet.engine.run_spec import RunSpec

from ..faults.runs import Watch, same
from ..test_conformance import alike, few
from .card import Cards
from .tape import record_on_tape

ROUNDS = PROVEN_ROUNDS + 1


@pytest.fixture
def on_the_processor(monkeypatch):
    """Runs on the processor may have streams, where there are none, and record their steps on a tape."""
    monkeypatch.setattr(Streams, "why_not", lambda self, run: "")
    monkeypatch.setattr(Streams, "recorder", lambda self: VisitRecorder(record_on_tape))


@pytest.mark.parametrize(
    ("method", "block"),
    [("scaffold", 1), *(pytest.param(*case, marks=pytest.mark.long) for case in [("scaffold", 4), ("fedmuon_bc", 4)])],
)
def test_clients_are_computed_as_they_are_alone(method, block, on_the_processor, monkeypatch):
    """float64: alone, short batches have no padding and sums another order; with and without recordings to the bit."""
    watch = Watch()
    found = run(few(method, rounds=ROUNDS, engine={"kernels": "streams", "block": block}), observers=[watch])
    assert not [text for text in watch.told if "replayed" in text]
    alike(found, run(few(method, rounds=ROUNDS, engine={"block": 1})))
    monkeypatch.setattr(Streams, "recorder", lambda self: None)
    same(found, run(few(method, rounds=ROUNDS, engine={"kernels": "streams", "block": block})))


def test_a_step_of_a_block_is_that_of_each_client():
    x, batch = {"a": torch.randn(3, 2, 4)}, (torch.randn(3, 4, 5), torch.randn(3))

    def step(x: Any, batch: Any) -> Any:
        return {"a": x["a"] @ batch[0]}, batch[1] + 1

    (a, b), (c, d) = Streams().together(step)(x, batch), vmap(step)(x, batch)
    assert torch.equal(a["a"], torch.stack([x["a"][i] @ batch[0][i] for i in range(3)]))
    torch.testing.assert_close(a["a"], c["a"])
    assert torch.equal(b, d)


def test_streams_begin_after_what_was_there_and_are_waited_for(monkeypatch):
    """On two cards that are not there."""
    cards = Cards(2)
    cards.install(monkeypatch)
    waits: list[tuple[int, int]] = []
    monkeypatch.setattr(
        torch.cuda.Stream, "wait_stream", lambda self, stream: waits.append((self.stream_id, stream.stream_id))
    )
    for cache in (streams.side_stream, recorded_visit.recording_stream):
        cache.cache_clear()
    torch.cuda.set_device(1)
    on: list[Any] = []

    def call(number: int) -> int:
        on.append((torch.cuda.current_stream().stream_id, len(waits)))
        return number

    assert beside([lambda number=number: call(number) for number in range(STREAMS + 1)]) == list(range(STREAMS + 1))
    sides = [stream.stream_id for stream in cards.streams]
    assert [stream.device_index for stream in cards.streams] == [1] * (STREAMS - 1)
    assert [stream for stream, _ in on] == [0, *sides, 0]
    assert {waited for _, waited in on} == {STREAMS - 1}  # the first wait for the main one, before any call
    assert waits == [*((side, 0) for side in sides), *((0, side) for side in sides)]
    assert beside([lambda: call(0)]) == [0]
    assert len(waits) == 2 * (STREAMS - 1)
    assert torch.cuda.current_stream().stream_id == 0
    streams.side_stream.cache_clear()


def test_what_cannot_be_a_block_has_torchs_kernels(on_the_processor, monkeypatch):
    """A block of one client is padded, which running statistics and user code may not bear."""
    run_spec = RunSpec.of("run", few("fedavg", engine={"kernels": "streams", "block": 1}))
    split = run_spec.split()
    assert plan_execution(run_spec, split, lambda *_: {})[0].execution_plan == (1, "streams")
    run_spec = run_spec.with_experiment(run_spec.experiment)
    run_spec.proofs.blocks = "they differ"
    assert plan_execution(run_spec, split, lambda *_: {})[0].execution_plan == (1, "torch")

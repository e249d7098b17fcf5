"""All calls of torch.cuda, on cards that refuse the same arguments as real ones; see card.py."""

from __future__ import annotations

import pytest
import torch

from fedfleet.engine import resume, run
from fedfleet.engine.accelerators import memory, settings
from fedfleet.engine.clients import worker
from fedfleet.engine.errors import ConfigError, Interrupted
from fedfleet.engine.kernels import recorded_visit
from fedfleet.engine.memory import release_freed_memory
from fedfleet.engine.planning.execution_plan import gpu
from fedfleet.engine.run_spec import RunSpec
from fedfleet.engine.runs.prepare import check_device

from ..faults.runs import Watch, cohort_of, interrupt, plan, rule, same, small
from ..test_conformance import few
from .card import TOTAL, Cards, OnTheProcessor, used_names


@pytest.fixture
def cards(monkeypatch):
    found = Cards(2)
    found.install(monkeypatch)
    recorded_visit.recording_stream.cache_clear()
    yield found
    recorded_visit.recording_stream.cache_clear()


@pytest.fixture(params=["cuda", "cuda:0", "cuda:1"])
def device(request):
    return torch.device(request.param)


def test_the_cards_are_as_strict_as_torch(cards):
    """Where torch wants an index, a device without one is an error."""
    without = torch.device("cuda")
    assert torch.cuda.is_available()
    with pytest.raises(ValueError, match="specified index"):
        torch.cuda.get_per_process_memory_fraction(without)
    with pytest.raises(ValueError, match="specified index"):
        torch.cuda.set_device(without)
    with pytest.raises(TypeError, match="must be `float`"):
        torch.cuda.set_per_process_memory_fraction(1, 0)
    with pytest.raises(AssertionError, match="Invalid device id"):
        torch.cuda.get_device_properties(2)
    with pytest.raises(RuntimeError, match="non-default stream"):
        torch.cuda.CUDAGraph().capture_begin()


def test_memory_of_a_device(cards, device):
    index = device.index or 0
    cards.allocated, cards.peak = 1 << 30, 2 << 30
    restore = memory.bound_memory(device, 0.25)
    assert cards.fractions[index] == 0.25
    assert memory.free_memory(device) == TOTAL // 4 - (1 << 30)
    assert memory.row_budget(device) == (TOTAL // 4 - (1 << 30)) // 2
    restore()
    assert cards.fractions == [1.0, 1.0]
    assert memory.free_memory(device) == TOTAL - (1 << 30)
    assert memory.allocated_memory(device) == 1 << 30
    assert memory.state_budget(device) == (TOTAL - (2 << 30)) // 2
    assert memory.peak_memory(device) == 2 << 30
    assert memory.peak_memory(device) == 1 << 30


def test_the_current_device_is_that_of_the_run_while_it_lasts(cards, device):
    torch.cuda.set_device(1)
    with settings.applied(device):
        assert torch.cuda.current_device() == (1 if device.index is None else device.index)
        if device.index is None:
            memory.bound_memory(device, 0.5)
            assert cards.fractions == [1.0, 0.5]
    assert torch.cuda.current_device() == 1


def test_graphs_of_a_device_are_recorded_on_one_stream(cards):
    """cuBLAS keeps a workspace for each stream on which it has run."""
    total = torch.zeros(3)
    for _ in range(5):
        replay = recorded_visit.record_cuda_graph(lambda: total.add_(1))
    before = total.clone()
    replay()
    assert torch.equal(total, before + 1)
    assert len(cards.streams) == 1
    torch.cuda.set_device(1)
    recorded_visit.record_cuda_graph(lambda: total.add_(1))
    assert [stream.device_index for stream in cards.streams] == [0, 1]


@pytest.mark.parametrize("kernels", ["torch", "graph"])
def test_a_run(cards, device, kernels, tmp_path):
    """A whole run that takes the way of one on a card, with its tensors in the processor's memory."""
    watch = Watch()
    with OnTheProcessor():
        found = run(few("scaffold", engine={"device": str(device), "kernels": kernels}), tmp_path / "out", [watch])
    same(found, run(few("scaffold", engine={"device": "cpu"})))
    assert not [text for text in watch.told if "replayed" in text]
    assert cards.fractions == [1.0, 1.0]
    assert len(cards.streams) == (kernels == "graph")


def test_batches_are_drawn_while_the_card_computes(cards, tmp_path, monkeypatch):
    """The processor waits once for each task, and before it waits for those of a round it draws the batches of the next
    one, of which none is drawn twice. Of three tasks, the next one begins before it waits for one."""
    drawn: list[int] = []  # for each task whose batches are drawn: for how many tasks the processor has waited
    draw = worker.stream
    monkeypatch.setattr(worker, "stream", lambda *given: drawn.append(cards.waits) or draw(*given))
    with OnTheProcessor():
        found = run(small(tmp_path, rounds=3, device="cuda", kernels="torch"))
    assert drawn == [0, 0, 0, 0, 0, 1, 3, 3, 3]  # the first task of round 1, those of round 2, the others of round 1
    assert cards.waits == 9
    same(found, run(small(tmp_path, rounds=3, device="cpu")))


@pytest.mark.long
@pytest.mark.parametrize(
    "fault",
    [rule(int(cohort_of(2)[3]), "raise"), rule(2, "card", 2, 2), rule(2, "card", 20, 1)],
    ids=str,
)
def test_clients_that_fail_on_a_card(cards, fault, tmp_path):
    """Tasks that have begun go on beside one that fails."""
    found = []
    for device in ("cpu", "cuda"):
        plan(tmp_path / device, fault)
        with OnTheProcessor():
            found.append(run(small(tmp_path / device, rounds=4, on_failure="drop", device=device, kernels="torch")))
    same(found[1], found[0])


@pytest.mark.parametrize("kernels", ["torch", "graph"])
def test_a_resumed_run(cards, kernels, tmp_path):
    """As test_gpu.py has it on a card."""
    settings_of = {"device": "cuda", "kernels": kernels, "checkpoint": {"every": 2}}
    with OnTheProcessor():
        expected = run(small(tmp_path / "none", **settings_of), tmp_path / "expected")
        with pytest.raises(Interrupted):
            run(small(tmp_path, **settings_of), tmp_path / "out", [Watch(r3=interrupt)])
        same(resume(tmp_path / "out"), expected)


def test_devices_that_are_not_there(cards):
    with pytest.raises(ConfigError, match=r"engine.device=cuda:2: this process sees 2 GPUs"):
        check_device(RunSpec.of("run", few("fedavg", engine={"device": "cuda:2"})))


def test_every_name_of_torch_cuda_is_called(cards, monkeypatch):
    """A new call is added to the tests above, and here."""
    cards.note_calls(monkeypatch)
    for name in ("cuda", "cuda:1"):
        device = torch.device(name)
        with settings.applied(device):
            memory.bound_memory(device, 0.25)()
            memory.free_memory(device)
            memory.allocated_memory(device)
            memory.peak_memory(device)
            recorded_visit.record_cuda_graph(lambda: torch.zeros(3).add_(1))
        check_device(RunSpec.of("run", few("fedavg", engine={"device": name})))
        assert gpu(RunSpec.of("run", few("fedavg", engine={"device": name})))[:2] == ["a card of tests", TOTAL]
    release_freed_memory()
    classes = {"CUDAGraph", "Event", "Stream", "graph"}
    assert cards.calls | classes == used_names()

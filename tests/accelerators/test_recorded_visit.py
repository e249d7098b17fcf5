"""Recorded visits of clients change no bit, whatever the method, and are not used where they would."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode

from fedfleet.engine.api import run
from fedfleet.engine.clients import local_training, worker
from fedfleet.engine.clients.batches import BlockBatches, Places, Stream, TaskBatches, gathered
from fedfleet.engine.kernels.cuda_graph import Graph
from fedfleet.engine.kernels.recorded_visit import MOST, PROVEN_ROUNDS, VisitRecorder
from fedfleet.engine.planning import autotune
from fedfleet.engine.run_spec import ExecutionPlan, RunSpec
from tests.methods import ON_ANY_MODEL as METHODS

from ..faults.runs import Watch, same
from ..test_conformance import Few, by_rounds, few
from .checker import META, on_meta
from .tape import Parts, record_on_tape

ROUNDS = PROVEN_ROUNDS + 1
"""In the last one, replays are used."""


@pytest.fixture
def recorders(monkeypatch):
    """Every worker's, in the order in which they are made."""
    made: list[VisitRecorder] = []

    def recorder(self: Graph) -> VisitRecorder:
        made.append(VisitRecorder(record_on_tape))
        return made[-1]

    monkeypatch.setattr(Graph, "recorder", recorder)
    return made


def graphs(method: str, workload: Any = None, **sections: Any) -> Any:
    """A run on the processor that records its steps; `engine.kernels` refuses this for users."""
    made = few(method, workload, ROUNDS, **sections)
    return made.model_copy(update={"engine": made.engine.model_copy(update={"kernels": "graph"})})


@pytest.fixture(autouse=True)
def on_the_processor(monkeypatch):
    monkeypatch.setattr(Graph, "why_not", lambda self, run: "")


SHORT = ("fedavg", "scaffold", "fedavg_vr", "fedmuon_bc", "diloco", "stem", "fedbat", "ef21_p")
"""Methods of all kinds. `make test-long` has the others, too."""


@pytest.mark.parametrize(
    "method", [pytest.param(name, marks=[] if name in SHORT else [pytest.mark.long]) for name in METHODS]
)
def test_replays_change_no_bit(method, recorders):
    """Clients of unequal steps and short batches, over rounds in which every input differs."""
    found = run(graphs(method))
    same(found, run(few(method, rounds=ROUNDS)))
    assert recorders
    assert not any(recorder.refused for recorder in recorders)
    assert sum(len(recorder.kept) for recorder in recorders) > 0
    assert all(len(recorder.kept) <= MOST for recorder in recorders)
    rounds = [recorder.rounds.values() for recorder in recorders]
    assert max(len(proven) for each in rounds for proven in each) == PROVEN_ROUNDS or by_rounds(method)


@dataclass(frozen=True)
class WithFrozenLayer(Few):
    def build(self):
        network = super().build()
        next(part for part in network.children() if isinstance(part, torch.nn.Linear)).requires_grad_(False)
        return network


def test_replays_have_the_frozen_tensors(recorders):
    found = run(graphs("scaffold", WithFrozenLayer()))
    same(found, run(few("scaffold", WithFrozenLayer(), rounds=ROUNDS)))
    assert any(recorder.kept for recorder in recorders)


@dataclass(frozen=True)
class Unrecordable(Few):
    def losses(self, p, batch):
        if _get_current_dispatch_mode() is not None:
            raise RuntimeError("operation not permitted when stream is capturing")
        return super().losses(p, batch)


def test_a_step_that_cannot_be_recorded_runs_as_it_is(recorders):
    watch = Watch()
    same(run(graphs("scaffold", Unrecordable()), observers=[watch]), run(few("scaffold", rounds=ROUNDS)))
    told = [text for text in watch.told if "replayed" in text]
    assert told == [
        "round 1: local steps run one by one, they cannot be replayed "
        "(RuntimeError: operation not permitted when stream is capturing)"
    ]


@pytest.fixture
def replays(monkeypatch):
    """What returns the rounds in which replays took the place of the steps of all blocks."""
    trainer = local_training.LocalTrainer
    rounds: dict[str, set[int]] = {"_recorded_block": set(), "_both_ways": set()}

    def noted(name: str) -> Any:
        function = getattr(trainer, name)

        def call(self: Any, *given: Any) -> Any:
            rounds[name].add(self.recorder.round)
            return function(self, *given)

        return call

    for name in rounds:
        monkeypatch.setattr(trainer, name, noted(name))
    return lambda: sorted(rounds["_recorded_block"] - rounds["_both_ways"])


@dataclass(frozen=True)
class Outside(Few):
    """Its losses depend on a number that is no tensor of the step."""

    factor: ClassVar[float] = 1.0

    def losses(self, p, batch):
        return super().losses(p, batch) * Outside.factor


@pytest.mark.parametrize("after", range(1, PROVEN_ROUNDS))
def test_what_differs_in_a_later_round_changes_no_bit(after, recorders, replays, monkeypatch):
    """A number that is recorded with the step is another one from a later round on: found before a replay is used."""

    def other() -> None:
        monkeypatch.setattr(Outside, "factor", 1.0 + 2.0**-20)

    monkeypatch.setattr(Outside, "factor", 1.0)
    watch = Watch(**{f"r{after}": other})
    found = run(graphs("scaffold", Outside()), observers=[watch])
    monkeypatch.setattr(Outside, "factor", 1.0)
    same(found, run(few("scaffold", Outside(), rounds=ROUNDS), observers=[Watch(**{f"r{after}": other})]))
    told = [text for text in watch.told if "replayed" in text]
    assert told == [
        f"round {after + 1}: local steps run one by one, they cannot be replayed "
        "(a replay gave other bits than the step)"
    ]
    assert replays() == []


def test_what_differs_long_after_the_proofs_is_found_and_told(recorders, replays, monkeypatch):
    """A block is compared again 4 rounds after the first one, and 8, 16 … rounds after it."""
    monkeypatch.setattr(Outside, "factor", 1.0)
    watch = Watch(r4=lambda: monkeypatch.setattr(Outside, "factor", 1.0 + 2.0**-20))
    asked = graphs("fedavg", Outside(), plan={"cohort": 6, "rounds": 6})
    run(asked, observers=[watch])
    assert [text for text in watch.told if "replayed" in text] == [
        "round 5: local steps run one by one, they cannot be replayed "
        "(a replay gave other bits than the step, and so perhaps did some before)"
    ]
    assert replays() == [4]


def test_replays_take_the_place_of_steps_once_they_are_proven(recorders, replays):
    run(graphs("fedavg", plan={"cohort": 6}))
    assert replays() == [ROUNDS]


class Started(TorchDispatchMode):
    """`count`: the operations on tensors that are no views of others."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def record_apart(call: Any) -> Any:
    """A recording whose replays are not counted, as they are one call on a device."""
    replay = record_on_tape(call)

    def alone() -> None:
        with _disable_current_modes():
            replay()

    return alone


def operations_of_a_block(steps: int, monkeypatch: pytest.MonkeyPatch, method: str = "fedavg") -> int:
    """How many operations the processor starts for the visit of a block of which replays are used."""
    counts: list[int] = []
    real = local_training.LocalTrainer.train_block

    def counted(self: Any, *given: Any) -> Any:
        with Started() as started:
            result = real(self, *given)
        counts.append(started.count)
        return result

    with monkeypatch.context() as patch:
        patch.setattr(Graph, "recorder", lambda self: VisitRecorder(record_apart))
        patch.setattr(local_training.LocalTrainer, "train_block", counted)
        run(graphs(method, plan={"cohort": 3, "local": {"steps": steps, "batch": 4}}))
    assert counts[-1] == min(counts)  # those of the last round, in which replays are used
    return counts[-1]


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "fedmuon_bc", "fedmud"])
def test_between_the_first_replay_and_the_last_one_the_processor_starts_nothing_else(method, monkeypatch):
    """The recording has the number of the step and gathers the batches."""
    three, seven = (operations_of_a_block(steps, monkeypatch, method) for steps in (3, 7))
    assert seven == three


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "fedmuon_bc", "fedmud"])
def test_for_a_visit_the_processor_starts_copies_alone(method, monkeypatch):
    """Of inputs into the recording and of results out of it, one for each tensor, after the places of the batches have
    been put together. What begins and finishes a visit is recorded too. Six more operations, in the processor's memory,
    find the shortest and the longest visit."""
    recorders: list[VisitRecorder] = []

    def noted(self: VisitRecorder, record: Any = record_apart, real: Any = VisitRecorder.__init__) -> None:
        real(self, record)
        recorders.append(self)

    monkeypatch.setattr(VisitRecorder, "__init__", noted)
    started = operations_of_a_block(3, monkeypatch, method)
    ((recording,),) = [recorder.kept.values() for recorder in recorders]
    places = len(pytree.tree_leaves(recording.inputs[3]))
    tensors = [leaf for part in (recording.inputs, recording.result) for leaf in pytree.tree_leaves(part)]
    assert started == len(tensors) + places + 6


def test_batches_are_copied_where_columns_do_not_stay_on_the_device(recorders, replays, monkeypatch):
    """The rows of a task are somewhere else in each task, where a recording would not find them."""
    monkeypatch.setattr(worker, "row_budget", lambda device: 0)
    same(run(graphs("scaffold")), run(few("scaffold", rounds=ROUNDS)))
    assert replays() == [ROUNDS]
    assert not any(recorder.refused for recorder in recorders)
    inputs = [recording.inputs for recorder in recorders for recording in recorder.kept.values()]
    assert all(isinstance(given[3], dict) for given in inputs)


def test_batches_of_another_step_are_found(recorders, replays, monkeypatch):
    """The proof covers what a recording gathers by itself."""
    real = Places.of_step
    monkeypatch.setattr(Places, "of_step", lambda self, k: real(self, torch.zeros_like(k)))
    watch = Watch()
    same(run(graphs("fedavg"), observers=[watch]), run(few("fedavg", rounds=ROUNDS)))
    assert [text for text in watch.told if "replayed" in text] == [
        "round 1: local steps run one by one, they cannot be replayed (a replay gave other bits than the step)"
    ]
    assert replays() == []


def test_blocks_of_about_as_many_steps_have_places_of_one_shape():
    """Clients with 1 to 8 steps are in blocks of all lengths, and batches have one shape."""
    drawn = torch.arange(8 * 8 * 4).view(8, 8, 4)
    steps, keys = torch.arange(1, 9), torch.arange(64).view(8, 8)
    stream = Stream(drawn, None, steps, keys)
    task = TaskBatches(stream, {}, drawn, keys, None, gathered)
    shapes = {BlockBatches(task, slice(at, at + 1)).places().rows.shape for at in range(8)}
    assert shapes == {(1, 8, 4)}
    for at in range(8):
        places = BlockBatches(task, slice(at, at + 1)).places()
        for k in range(at + 1):
            found = places.of_step(torch.tensor(k))
            assert torch.equal(found.rows, drawn[at : at + 1, k])
            assert torch.equal(found.keys, keys[at : at + 1, k])


def test_a_step_is_compared_with_its_own_inputs_and_not_with_copies():
    """What a device computes may depend on where its numbers lie: three clients that begin with the same numbers may
    share them in memory, and a recording has copies of them."""

    def step(inputs: Any, local: Any) -> Any:
        return local + inputs * (1 if local.is_contiguous() else 2)

    shared = torch.ones(2).expand(3, 2)
    recorder = VisitRecorder(record_on_tape)
    visit = Parts(lambda inputs: torch.ones(3, 2) * inputs, step, lambda inputs, local: local * inputs)
    recording = recorder.recording(visit, torch.ones(()))
    assert recording is not None
    assert not recording.steps(torch.ones(()), shared, step(torch.ones(()), shared))
    assert recording.steps(torch.ones(()), shared, step(torch.ones(()), shared.contiguous()))


def test_replays_of_clients_that_all_take_the_same_number_of_steps(recorders):
    """No state is chosen from old and new ones, and STEM keeps the model before a step as it is."""
    plan = {"local": {"steps": 3, "batch": 4}}
    same(run(graphs("stem", plan=plan)), run(few("stem", rounds=ROUNDS, plan=plan)))
    assert [recorder.refused for recorder in recorders] == [""]
    assert all(visit.equal for visit, _ in recorders[0].kept)


def test_a_state_may_take_the_place_of_another_one():
    """As the last model but one, which is the last model after a step: its memory is written over in the same step."""
    visit = Parts(
        lambda inputs: (inputs, -inputs, inputs.view(3, 1)),
        lambda inputs, local: (local[0] + inputs, local[0], local[1].view(3, 1)),
        lambda inputs, local: local[0] + 2 * local[1],
    )
    inputs = torch.tensor([1.0, 2.0, 4.0])
    recording = VisitRecorder(record_on_tape).recording(visit, inputs)
    assert recording is not None
    local = visit.begin(inputs)
    assert recording.steps(inputs, local, visit.step(inputs, local))


@pytest.mark.parametrize("wrong", ["begin", "step", "finish"])
def test_each_part_of_a_visit_is_compared(wrong):
    """A number that a part takes from elsewhere is another one when it is compared."""
    factors = {"begin": 1.0, "step": 1.0, "finish": 1.0}
    visit = Parts(
        lambda inputs: inputs * factors["begin"],
        lambda inputs, local: local + inputs * factors["step"],
        lambda inputs, local: local * inputs * factors["finish"],
    )
    inputs = torch.full((3,), 2.0)
    recording = VisitRecorder(record_on_tape).recording(visit, inputs)
    assert recording is not None
    factors[wrong] = 1.0 + 2.0**-20
    found = {
        "begin": recording.begins(inputs, visit.begin(inputs)),
        "step": recording.steps(inputs, inputs, visit.step(inputs, inputs)),
        "finish": recording.finishes(inputs, inputs, visit.finish(inputs, inputs)),
    }
    assert found == {part: part != wrong for part in factors}


def test_on_a_device_clients_begin_with_memory_of_their_own():
    """Then the first step is the same kernels as the others, with a recording and without one."""
    given = {"block": 3}
    run_spec = RunSpec.of("run", few("fedmuon_ma", engine=given))
    algorithm, x = run_spec.method(), run_spec.initial_model()
    public = on_meta(algorithm.unpack(algorithm.broadcast(algorithm.server_init(x))))
    trainer = local_training.LocalTrainer(algorithm, run_spec.workload, x.to(META))
    with torch.no_grad():
        local = trainer.begin_block(public, (), torch.ones(3, dtype=torch.int64, device=META))
    assert all(leaf.is_contiguous() for leaf in pytree.tree_leaves(local))


def test_the_share_that_is_done_is_the_same_number_in_a_recording():
    """torch divides a number by a tensor as the number times the tensor's reciprocal, which differs from the quotient
    of two tensors: at 3 of 5 steps, for example."""
    steps = torch.arange(1, 60)
    ones, seen = torch.ones(len(steps), dtype=torch.float64), []

    def step(client: Any, local: Any, batch: Any, done: torch.Tensor) -> Any:
        seen.append(done)
        return local, ones

    trainer: Any = SimpleNamespace(block_step=lambda public: step)
    visit = local_training.BlockVisit(trainer, gathers=False, equal=False)
    for k in range(60):
        local = (ones, ones, torch.tensor(k))
        *_, following = visit.step(((), (), steps, {}), local)
        assert following == k + 1
        assert torch.equal(seen[-1], k / steps.to(torch.float64))


def test_measurements_of_plans_are_of_replays(recorders, replays):
    """The passes that count come after those in which recordings are proven."""
    run_spec = RunSpec.of("run", graphs("fedavg"))
    split = run_spec.split()
    passes = autotune.time_plan(
        run_spec, worker.Data.of(split.train, split.test, split.client_index), ExecutionPlan(3, "graph")
    )
    next(passes)
    assert replays() == []  # the round has been met before, without replays
    (recorder,) = recorders
    assert recorder.kept
    assert all(recording.proven for recording in recorder.kept.values())


SUM = Parts(torch.zeros_like, lambda inputs, local: local + inputs, lambda inputs, local: 2 * local)


def test_memory_that_runs_out_is_no_reason_to_refuse():
    def full(call: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    recorder = VisitRecorder(full)
    with pytest.raises(torch.OutOfMemoryError):
        recorder.recording(SUM, torch.ones(2))
    assert recorder.refused == ""


def test_old_recordings_are_dropped():
    recorder = VisitRecorder(record_on_tape)
    for size in range(1, MOST + 3):
        assert recorder.recording(SUM, torch.ones(size)) is not None
    assert len(recorder.kept) == MOST


def test_a_schedule_makes_new_recordings(recorders):
    schedule = {"name": "fedavg", "rule": {"name": "sgd", "lr": {"schedule": "cosine", "start": 0.1, "end": 0.01}}}
    changed, plain = (
        made.model_copy(update={"method": schedule}) for made in (graphs("fedavg"), few("fedavg", rounds=ROUNDS))
    )
    same(run(changed), run(plain))
    (recorder,) = recorders
    shapes = [shapes for _, shapes in recorder.kept]
    assert len(shapes) > len(set(shapes))
    assert recorder.rounds
    assert RunSpec.of("run", changed).method_has_schedule

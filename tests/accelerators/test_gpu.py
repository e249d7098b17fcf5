"""What only a CUDA device can show: the promises that are tested on the processor, on the device. See `make gpu`."""

from __future__ import annotations

import gc
import json
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from fedfleet.engine import resume, run
from fedfleet.engine.accelerators import settings
from fedfleet.engine.backends.local import LocalPool
from fedfleet.engine.clients.local_training import LocalTrainer
from fedfleet.engine.clients.worker import Data, Worker
from fedfleet.engine.cohorts.tasks import Broadcast, ClientTask, TrainingTask
from fedfleet.engine.errors import Interrupted
from fedfleet.engine.kernels.agreement import Disagreement
from fedfleet.engine.kernels.contract import Kernels
from fedfleet.engine.kernels.recorded_visit import PROVEN_ROUNDS, VisitRecorder
from fedfleet.engine.kernels.replacements import Replacements
from fedfleet.engine.method_form.state_spec import StateSpec, some_view
from fedfleet.engine.planning.autotune import measure
from fedfleet.engine.planning.execution_plan import candidates
from fedfleet.engine.planning.kernel_proof import prove
from fedfleet.engine.run_spec import RunSpec
from fedfleet.engine.state.row_files import StateLayout
from fedfleet.engine.state.row_table import RowTable
from tests.methods import ON_ANY_MODEL as METHODS

from ..faults.runs import Watch, interrupt, same, small
from ..test_conformance import alike, few
from .tape import Parts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is here"),
]
CUDA = torch.device("cuda")
KERNELS = ("torch", "graph")


def on_gpu(method: str, **engine: Any) -> Any:
    return few(method, engine={"device": "cuda", "kernels": "torch", **engine})


@pytest.mark.parametrize("method", METHODS)
def test_a_block_is_its_clients_alone(method):
    """float64: within the rounding of another order of sums, see tests/test_conformance.py."""
    together, again = run(on_gpu(method)), run(on_gpu(method))
    assert together.model_sha256 == again.model_sha256
    alike(run(on_gpu(method, block=1, vectorise=False)), together)


@pytest.mark.parametrize("method", METHODS)
def test_the_processor_agrees(method):
    alike(run(on_gpu(method)), run(few(method, engine={"device": "cpu"})))


@pytest.mark.parametrize("method", METHODS)
def test_graphs_change_no_bit(method):
    """Replays are used in the last three rounds."""
    watch = Watch()
    plain, graphs = (few(method, rounds=PROVEN_ROUNDS + 3, engine={"device": "cuda", "kernels": k}) for k in KERNELS)
    same(run(graphs, observers=[watch]), run(plain))
    assert not [text for text in watch.told if "replayed" in text]


@dataclass(frozen=True)
class Longer(Kernels):
    """Linear layers whose results are some times as long."""

    name: ClassVar[str] = "longer"
    factor: float
    places: ClassVar[set[str]] = set()

    def linear(self, x: Tensor, *given: Any) -> Tensor:
        self.places.add(x.device.type)
        return self.factor * F.linear(x, *given)

    def around_losses(self) -> Replacements:
        return Replacements({F.linear: self.linear})


def test_kernels_are_proven_on_the_device():
    run_spec = RunSpec.of("run", on_gpu("scaffold", dtype="float32"))
    prove(run_spec, run_spec.split(), Longer(1.0))
    with pytest.raises(Disagreement, match=r"is .* off torch's"):
        prove(run_spec, run_spec.split(), Longer(1.01))
    assert Longer.places == {"cuda"}


@pytest.mark.parametrize("method", METHODS)
def test_local_training_never_waits(method):
    """torch raises an exception where the processor would wait for the device."""
    run_spec = RunSpec.of("run", on_gpu(method))
    split = run_spec.split()
    with torch.no_grad(), settings.applied(CUDA):
        data, nowhere = Data.of(split.train, split.test, split.client_index), StateLayout("", 0, False, False)
        worker = Worker(run_spec, data, nowhere, lambda: None)
        assert worker.columns.resident is not None
        algorithm = run_spec.method()
        x = worker.x
        public = algorithm.unpack(algorithm.broadcast(algorithm.server_init(x)))
        client = algorithm.client_init(public)
        public = some_view(algorithm, public, client)
        client = pytree.tree_map(lambda leaf: leaf.to(CUDA).expand(3, *leaf.shape), client)
        trainer = LocalTrainer(algorithm, run_spec.workload, x)
        columns = {name: column[:12].view(3, 4, *column.shape[1:]) for name, column in worker.columns.resident.items()}
        columns["key"] = torch.arange(3, device=CUDA)
        columns["weight"] = torch.full((3, 4), 0.25, device=CUDA, dtype=x.flat.dtype)
        steps = torch.tensor([3, 2, 1])
        trainer.train_block(public, client, steps, lambda k: columns)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            trainer.train_block(public, client, steps, lambda k: columns)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "fedmuon_bc"])
def test_a_task_is_launched_without_waiting(method):
    """From the public state to the copy of the sums, with clients' states from an earlier round on the card. FedMUD
    asks for the number of its turn once in a round, before anything runs."""
    run_spec = RunSpec.of("run", on_gpu(method))
    split = run_spec.split()
    with torch.no_grad(), settings.applied(CUDA):
        method = run_spec.method()
        leaves = pytree.tree_leaves(method.broadcast(method.server_init(run_spec.initial_model())))
        arrays = [leaf.cpu().numpy() for leaf in leaves]
        table = RowTable(StateSpec(method, run_spec.initial_model()).client, 6, 12)
        pool = LocalPool(run_spec, Data.of(split.train, split.test, split.client_index), table.layout, lambda: None)
        pool.keep_rows(table)
        clients, cut = np.arange(6), (3, 6)
        for number in range(1, 4):
            columns = (np.full(6, number - 1), np.ones(6), *table.reserve(clients))
            task = TrainingTask.of(ClientTask(0, clients, cut), (number, False), clients, columns)
            torch.cuda.set_sync_debug_mode("error" if number == 3 else "default")
            try:
                result = pool.worker.launch("train", task, Broadcast(number, arrays))
                pool.ahead(lambda task=task: [task])
            finally:
                torch.cuda.set_sync_debug_mode("default")
            assert np.isfinite(result().clients["loss"]).all()
            table.commit()
        pool.close()
        table.remove()


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("method", ["scaffold", "fedmuon_bc", "fedmud"])
def test_states_on_the_card_are_those_in_files(method, kernels):
    files, card = (
        few(method, rounds=PROVEN_ROUNDS + 3, engine={"device": "cuda", "kernels": kernels, "state_memory": gib})
        for gib in (0, "auto")
    )
    same(run(card), run(files))


@pytest.mark.parametrize("kernels", [*KERNELS, "streams"])
def test_a_resumed_run_has_the_same_bits(kernels, tmp_path):
    settings_of = {"device": "cuda", "kernels": kernels, "checkpoint": {"every": 2}}
    expected = run(small(tmp_path / "none", **settings_of), tmp_path / "expected")
    with pytest.raises(Interrupted):
        run(small(tmp_path, **settings_of), tmp_path / "out", [Watch(r3=interrupt)])
    same(resume(tmp_path / "out"), expected)


def test_memory_that_runs_out_halves_the_blocks(tmp_path):
    """The allocator may have no more than blocks of half the size need. The largest tensor of a block decides."""
    workload = {"name": "digits", "model": {"name": "mlp", "hidden": [4096]}}
    base = few("fedavg", plan={"clients": 64, "cohort": 64, "rounds": 2, "local": {"steps": 2, "batch": 8}})
    wide = base.model_copy(update={"workload": workload})

    def blocks(size: int) -> Any:
        return wide.model_copy(
            update={"engine": wide.engine.model_copy(update={"device": "cuda", "kernels": "torch", "block": size})}
        )

    def cleared() -> None:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    cleared()
    run(blocks(16))
    needed = torch.cuda.max_memory_reserved()
    cleared()
    total = torch.cuda.get_device_properties(CUDA).total_memory
    torch.cuda.set_per_process_memory_fraction(1.2 * needed / total)
    try:
        watch = Watch()
        found = run(blocks(64), tmp_path / "out", [watch])
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert any("clients instead of 64 from here on" in text for text in watch.told)
    size = json.loads((tmp_path / "out" / "plan.json").read_text())["block"]
    assert size in (16, 32)
    same(found, run(blocks(size)))


def test_memory_is_flat_over_rounds_and_runs():
    def settled() -> int:
        gc.collect()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    seen: list[int] = []

    def note() -> None:
        seen.append(torch.cuda.memory_allocated())

    made = few("scaffold", rounds=1000, engine={"device": "cuda", "kernels": "graph"})
    run(made, observers=[Watch(r20=note, r500=note, r990=note)])
    after_one = settled()
    assert seen[1] <= 1.01 * seen[0]
    assert seen[2] <= 1.01 * seen[0]
    run(made.model_copy(update={"federation": made.federation.model_copy(update={"rounds": 50})}))
    assert settled() <= after_one + (1 << 20)
    assert torch.cuda.memory_reserved() <= 1.1 * max(seen) + (64 << 20)


@pytest.mark.parametrize("kernels", ["torch", "graph"])
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_workers_share_the_card(workers, kernels, ray_with_gpu):
    made = on_gpu("scaffold", kernels=kernels)
    engine = {"backend": "ray", "workers": workers, "gpus": 1 / workers, "cpus": 0.25}
    same(run(made.model_copy(update={"engine": made.engine.model_copy(update=engine)})), run(made))


@pytest.fixture(scope="module")
def ray_with_gpu():
    pytest.importorskip("ray")
    from fedfleet.engine.backends.ray.connect import shutdown

    shutdown()
    yield
    shutdown()


def test_a_fraction_bounds_the_memory():
    run(on_gpu("fedavg", gpus=0.25))
    assert torch.cuda.get_per_process_memory_fraction() == 1.0  # as before the run


def test_a_plan_is_measured():
    made = few("fedavg", plan={"clients": 64, "cohort": 64}, engine={"device": "cuda", "block": "auto"})
    run_spec = RunSpec.of("run", made.model_copy(update={"workload": "digits"}))
    with settings.applied(CUDA):
        found = measure(run_spec, run_spec.split(), candidates(run_spec))
    assert any(plan.kernels == "graph" for plan in found)
    assert all(seconds > 0 for seconds in found.values())


@pytest.mark.parametrize("precision", ["tf32", "bfloat16"])
def test_reduced_precision_stays_near(precision):
    made = on_gpu("fedavg", dtype="float32")
    reduced = made.model_copy(update={"engine": made.engine.model_copy(update={"precision": precision})})
    exact, near = run(made).model, run(reduced).model
    for name, value in exact.items():
        assert float((near[name] - value).abs().max()) <= 0.05 * float(value.abs().max())


def test_a_recorder_records():
    recorder = VisitRecorder()
    inputs, local = torch.ones(3, device=CUDA), torch.zeros(3, device=CUDA)
    visit = Parts(lambda given: -given, lambda given, state: state + given, lambda given, state: state * given)
    recording = recorder.recording(visit, inputs)
    assert recording is not None, recorder.refused
    assert recording.begins(2 * inputs, torch.full((3,), -2.0, device=CUDA))
    assert not recording.begins(2 * inputs, local)
    assert recording.steps(inputs, local, torch.ones(3, device=CUDA))
    assert recording.steps(2 * inputs, local, torch.full((3,), 2.0, device=CUDA))
    assert not recording.steps(inputs, local, local)
    assert recording.finishes(2 * inputs, 3 * inputs, torch.full((3,), 6.0, device=CUDA))
    assert not recording.finishes(inputs, 3 * inputs, local)


def test_graphs_are_recorded_on_one_stream():
    """cuBLAS keeps a workspace for each stream, which would be another one for each recording."""
    local, inputs = torch.zeros(3, 4, 4, device=CUDA), torch.ones(3, 4, 4, device=CUDA)
    visit = Parts(torch.zeros_like, lambda given, state: state @ given, lambda given, state: state @ given)

    def record() -> None:
        recording = VisitRecorder().recording(visit, inputs)
        assert recording is not None
        assert recording.steps(inputs, local, local)

    def held() -> int:
        gc.collect()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    record()
    before = held()
    for _ in range(4):
        record()
    assert held() <= before

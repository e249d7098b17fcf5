"""Settings of devices, and what follows where a device is full, is gone or cannot repeat its sums."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fedfleet.algorithms.parts.orthogonal import newton_schulz
from fedfleet.engine import run
from fedfleet.engine.accelerators import settings
from fedfleet.engine.accelerators.columns import DeviceColumns
from fedfleet.engine.accelerators.faults import is_device_lost
from fedfleet.engine.clients.worker import Data
from fedfleet.engine.errors import ConfigError, DeviceLost
from fedfleet.engine.kernels.operators import in_bfloat16, orthogonalised_by
from fedfleet.engine.memory import is_device_full, is_out_of_memory
from fedfleet.engine.planning import as_written, autotune, execution_plan
from fedfleet.engine.planning.execution_plan import candidates, plan_by_rule, worth_measuring
from fedfleet.engine.run_spec import ExecutionPlan, RunSpec
from fedfleet.engine.runs.prepare import prepare
from fedfleet.tune.bench.works import Noise
from fedfleet.workloads.models.small import LeNet

from ..faults.runs import Watch
from ..test_conformance import Few, few

META = torch.device("meta")


def torch_settings() -> list[object]:
    cudnn: Any = torch.backends.cudnn
    deterministic: Any = torch.utils.deterministic
    return [
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        deterministic.fill_uninitialized_memory,
        cudnn.benchmark,
        cudnn.deterministic,
        *[part.fp32_precision for part in (torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn)],
    ]


@pytest.mark.parametrize("tf32", [False, True])
def test_a_device_computes_deterministically_and_leaves_no_setting_behind(tf32, monkeypatch):
    monkeypatch.delenv(settings.WORKSPACE, raising=False)
    before = torch_settings()
    with settings.applied(META, tf32):
        assert torch_settings() == [True, True, False, False, True, *["tf32" if tf32 else "ieee"] * 3]
        assert os.environ[settings.WORKSPACE] == ":4096:8"
    assert torch_settings() == before
    with settings.applied(torch.device("cpu")):
        assert torch_settings() == before


def test_the_users_own_workspace_is_kept_and_told(monkeypatch):
    monkeypatch.setenv(settings.WORKSPACE, ":0:0")
    with settings.applied(META):
        assert settings.workspace_clause().startswith("CUBLAS_WORKSPACE_CONFIG=:0:0: products on the GPU may differ")
    monkeypatch.setenv(settings.WORKSPACE, ":16:8")
    assert settings.workspace_clause() == ""


@dataclass(frozen=True)
class Unordered(Few):
    """Its loss has a kernel without a deterministic form, also on the processor."""

    def losses(self, p, batch):
        torch.zeros(2).put_(torch.tensor([1]), torch.tensor([1.0]))
        return super().losses(p, batch)


def test_the_run_says_which_kernels_have_no_deterministic_form(monkeypatch):
    watch = Watch()
    with monkeypatch.context() as patch:  # on the processor, with the settings of a device
        of_process = settings.of_process
        patch.setattr(settings, "of_process", lambda device, tf32: of_process(META, tf32))
        run(few("fedavg", Unordered(), rounds=2), observers=[watch])
    assert [text for text in watch.told if "deterministic" in text] == [
        "round 1: put_ on cpu has no deterministic form: this run may not repeat to the bit"
    ]
    watch = Watch()
    run(few("fedavg", Unordered(), rounds=1), observers=[watch])
    assert not any("deterministic" in text for text in watch.told)


@dataclass(frozen=True)
class Gone(Few):
    def losses(self, p, batch):
        if not as_written.under_way():
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return super().losses(p, batch)


def test_a_lost_device_ends_a_run_in_this_process_with_one_sentence():
    with pytest.raises(
        DeviceLost, match=r"failed under this process .*illegal memory access.*; start again, or resume"
    ):
        run(few("fedavg", Gone(), rounds=1))


@pytest.mark.parametrize(
    ("error", "full", "lost"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), True, False),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True, False),
        (RuntimeError("CUDA error: out of memory"), True, False),
        (RuntimeError("CUDA error: unspecified launch failure"), False, True),
        (torch.AcceleratorError("CUDA error: device-side assert triggered"), False, True),
        (MemoryError(), False, False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False, False),
    ],
)
def test_what_an_error_of_a_device_says(error, full, lost):
    assert (is_device_full(error), is_device_lost(error)) == (full, lost)
    assert is_out_of_memory(error) == (full or isinstance(error, MemoryError))


def test_newton_schulz_in_bfloat16():
    """Singular values within the error of bfloat16, 2^-8, through five iterations of slope at most 3.44."""
    m = torch.randn(3, 8, 12, generator=torch.Generator().manual_seed(0))
    exact = newton_schulz(m, "jordan", 5)
    with orthogonalised_by(in_bfloat16):
        half = newton_schulz(m, "jordan", 5)
    assert half.dtype == m.dtype
    assert 0 < float((half - exact).abs().max()) < 0.1
    assert torch.equal(newton_schulz(m, "jordan", 5), exact)


@pytest.mark.parametrize(
    ("engine", "says"),
    [
        ({"precision": "tf32"}, "engine.precision: bfloat16 and tf32 are for float32, got tf32 with dtype=float64"),
        ({"device": "cuda:2"}, "engine.device=cuda:2: this process sees 1 GPUs, numbered from 0; use cuda:0"),
        ({"gpus": 2}, r"engine.gpus: the workers reserve 2 GPUs, and this process sees 1 \(CUDA_VISIBLE_DEVICES\)"),
        (
            {"gpus": 0.5, "workers": 3, "backend": "ray"},
            r"engine.gpus: the workers reserve 1.5 GPUs, and this process sees 1",
        ),
    ],
)
def test_gpus_that_are_not_there(engine, says, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(ConfigError, match=says):
        prepare(few("fedavg", engine=engine), "run")
    prepare(few("fedavg", engine={"gpus": 0.5}), "run")


def on_a_card(workload: Any = "digits", batch: int = 4, **engine: Any) -> RunSpec:
    plan = {"clients": 64, "cohort": 64, "local": {"steps": 1, "batch": batch}}
    return RunSpec.of("run", few("fedavg", workload, plan=plan, engine={"device": "cuda", "block": "auto", **engine}))


def lenet(batch: int) -> RunSpec:
    return on_a_card(Noise(LeNet(), examples=256), batch)


def test_plans_that_are_tried_on_a_gpu(monkeypatch):
    """First what is most promising, which short runs take too, and then small blocks, which take little time."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    run_spec = on_a_card()
    plans = candidates(run_spec)
    assert plans[:3] == [(64, "graph"), (64, "torch"), (4, "streams")]
    assert plans[-4:] == [(32, "graph"), (32, "torch"), (16, "graph"), (16, "torch")]
    assert {plan.block for plan in plans if plan.kernels == "streams"} == {1, 2, 4}
    assert (1, "torch") in plans
    assert (1, "graph") not in plans
    assert plan_by_rule(run_spec) == plans[0]
    split = run_spec.split()
    assert worth_measuring(run_spec, split)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert not worth_measuring(run_spec, split)


def test_where_convolutions_are_products_by_the_rule(monkeypatch):
    """Where a client alone does not keep the card busy; one that does is beside others. A process without a card, such
    as a driver on another node, can prove nothing."""
    assert candidates(lenet(4))[0] == (64, "graph")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    small = lenet(4)
    assert candidates(small)[:2] == [(64, "products"), (64, "graph")]
    monkeypatch.setattr(execution_plan, "BUSY", small.multiplications_of_batch())
    assert candidates(small)[:2] == [(4, "streams"), (4, "graph")]
    assert plan_by_rule(small) == (4, "streams")
    assert plan_by_rule(on_a_card(kernels="graph")) == (64, "graph")
    assert plan_by_rule(on_a_card(block=7)) == (7, "graph")
    assert plan_by_rule(on_a_card(vectorise=False)) == (1, "torch")


def test_a_measurement_on_a_gpu_ends_in_time(monkeypatch):
    """The first plan is left before the time is up, so that another one is tried, and so is the last one."""
    now, seconds = 0.0, {64: 9.0, 4: 0.5, 32: 9.0, 1: 0.1}

    def timed(run_spec: RunSpec, data: object, plan: ExecutionPlan, until: float, columns: Any) -> Iterator[float]:
        nonlocal now
        end = now + seconds[plan.block]
        now = min(end, until + 1e-3)
        if end > until:
            raise autotune.TooSlow
        yield seconds[plan.block]

    monkeypatch.setattr(autotune, "time_plan", timed)
    monkeypatch.setattr(autotune, "time", SimpleNamespace(perf_counter=lambda: now))
    run_spec, plans = on_a_card(), [ExecutionPlan(block, "torch") for block in (64, 4, 32, 1)]
    found = autotune.measure(run_spec, run_spec.split(), plans)
    assert found == {plans[1]: 0.5}
    assert now <= autotune.GPU_SECONDS + 2e-3


def test_passes_before_the_time_is_up_count(monkeypatch):
    """A large network takes longer for its passes than there is time, and one of them says how long a client takes."""
    now = 0.0

    def timed(run_spec: RunSpec, data: object, plan: ExecutionPlan, until: float, columns: Any) -> Iterator[float]:
        nonlocal now
        for _ in range(autotune.REPEATS):
            now += 0.5
            if now > until:
                raise autotune.TooSlow
            yield 0.1 * plan.block

    monkeypatch.setattr(autotune, "time_plan", timed)
    monkeypatch.setattr(autotune, "time", SimpleNamespace(perf_counter=lambda: now))
    run_spec, plans = on_a_card(), [ExecutionPlan(block, "torch") for block in (4, 2, 1)]
    assert autotune.measure(run_spec, run_spec.split(), plans) == {plans[0]: 0.4, plans[1]: 0.2}
    assert now == autotune.GPU_SECONDS + 0.5  # the second plan was left in its second pass


def test_all_plans_of_a_measurement_have_one_copy_of_the_columns(monkeypatch):
    placed: list[Any] = []
    real = DeviceColumns.__init__

    def noted(self: DeviceColumns, *given: Any) -> None:
        placed.append(self)
        real(self, *given)

    monkeypatch.setattr(DeviceColumns, "__init__", noted)
    run_spec = RunSpec.of("run", few("fedavg"))
    plans = [ExecutionPlan(block, "torch") for block in (1, 3)]
    assert [*autotune.measure(run_spec, run_spec.split(), plans)] == plans
    assert len(placed) == 1


def test_a_network_that_keeps_a_card_busy_is_measured_with_one_local_step(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    small = lenet(4)
    federation = small.experiment.federation.model_copy(
        update={"local": small.experiment.federation.local.taking(steps=3)}
    )
    small = replace(small, experiment=small.experiment.model_copy(update={"federation": federation}))
    split = small.split()
    data = Data.of(split.train, split.test, split.client_index)
    steps = lambda: autotune.short_run(small, data, ExecutionPlan(4, "graph")).experiment.federation.local.steps  # noqa: E731
    assert steps() == autotune.GPU_STEPS
    monkeypatch.setattr(execution_plan, "BUSY", small.multiplications_of_batch())
    assert steps() == 1


def test_a_plan_is_left_between_local_steps():
    run_spec = RunSpec.of("run", few("fedavg"))
    split = run_spec.split()
    data = Data.of(split.train, split.test, split.client_index)
    with pytest.raises(autotune.TooSlow):
        next(autotune.time_plan(run_spec, data, ExecutionPlan(3, "torch"), until=0.0))


def test_recorded_visits_are_for_gpus():
    with pytest.raises(
        ConfigError,
        match=r"engine.kernels: .* they are for CUDA devices, .*got graph; choose torch or",
    ):
        prepare(few("fedavg", engine={"kernels": "graph"}), "run")

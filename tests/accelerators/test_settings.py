"""Settings of devices, and what follows where a device is full, is gone or cannot repeat its sums."""

from __future__ import annotations

import os
from dataclasses import dataclass

import pytest
import torch

from fedfleet.algorithms.parts.orthogonal import newton_schulz
from fedfleet.engine import run
from fedfleet.engine.accelerators import settings
from fedfleet.engine.accelerators.faults import is_device_lost
from fedfleet.engine.errors import ConfigError, DeviceLost
from fedfleet.engine.kernels.operators import in_bfloat16, orthogonalised_by
from fedfleet.engine.memory import is_device_full, is_out_of_memory
from fedfleet.engine.planning import as_written
from fedfleet.engine.planning.execution_plan import can_measure, candidates
from fedfleet.engine.run_spec import RunSpec
from fedfleet.engine.runs.prepare import prepare

from ..faults.runs import Watch
from ..test_conformance import Few, few

META = torch.device("meta")


def torch_settings() -> list[object]:
    cudnn = torch.backends.cudnn
    return [
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
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


def test_plans_that_are_tried_on_a_gpu(monkeypatch):
    """Blocks of one client are not recorded, and larger blocks are tried than on the processor."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    made = few("fedavg", plan={"clients": 64, "cohort": 64}, engine={"device": "cuda", "block": "auto"})
    plans = candidates(RunSpec.of("run", made))
    assert plans[:3] == [(1, "torch"), (4, "torch"), (4, "graph")]
    assert plans[-2:] == [(64, "torch"), (64, "graph")]
    assert can_measure(torch.device("cuda"))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert not can_measure(torch.device("cuda"))


def test_recorded_steps_are_for_gpus():
    with pytest.raises(
        ConfigError,
        match=r"engine.kernels: .* they are for CUDA devices, .*got graph; choose torch or",
    ):
        prepare(few("fedavg", engine={"kernels": "graph"}), "run")

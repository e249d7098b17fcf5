"""Convolutions and pooling in Triton: what its interpreter makes of them on the processor, which calls they leave to
torch, and the same on a card."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from torch.func import vmap

from fedfleet.engine import run
from fedfleet.engine.config.schema import Experiment
from fedfleet.engine.kernels import triton_kernels
from fedfleet.engine.kernels.triton_kernels import convolution, has_triton, pooling

from ..faults.runs import Watch, same
from ..test_conformance import few
from .interpreted import BOUND, CONVOLUTIONS, POOLINGS, SHARE, SOME, equal, off
from .test_everywhere import ROUNDS, WORKLOAD

needs_triton = pytest.mark.skipif(not has_triton(), reason="triton is not here")


@cache
def found(*given: str) -> dict[str, list[float] | bool]:
    """What `interpreted.py` prints."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.accelerators.interpreted", *given]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, env=env, cwd=root, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def check_convolutions(count: int, *given: str) -> None:
    results = {name: value for name, value in found(*given).items() if isinstance(value, list)}
    assert len(results) == count
    assert {name: value for name, value in results.items() if max(value) > BOUND} == {}


@needs_triton
def test_convolutions_are_torchs_within_rounding():
    check_convolutions(SOME + 1)


@needs_triton
@pytest.mark.long
def test_all_convolutions_are_torchs_within_rounding():
    check_convolutions(len(CONVOLUTIONS) + 2, "all")


@needs_triton
def test_pooling_is_torchs():
    results = {name: value for name, value in found().items() if isinstance(value, bool)}
    assert len(results) == len(POOLINGS)
    assert [name for name, same in results.items() if not same] == []


def test_what_is_left_to_torch():
    """One model for all clients, float64, images without examples, an uneven `same`, and windows beyond a byte."""
    images, weights = torch.ones(2, 1, 1, 4, 4), torch.ones(2, 1, 1, 2, 2)
    left: list[bool] = []

    def note(own: torch.Tensor | None) -> torch.Tensor:
        left.append(own is None)
        return torch.zeros(())

    vmap(lambda x: note(convolution(x, weights[0])))(images)
    vmap(lambda x, w: note(convolution(x, w)))(images.double(), weights.double())
    vmap(lambda x, w: note(convolution(x[0], w)))(images, weights)
    vmap(lambda x, w: note(convolution(x, w, padding="same")))(images, weights)
    note(pooling(images[0], 2))
    vmap(lambda x: note(pooling(x, 2, ceil_mode=True)))(images)
    vmap(lambda x: note(pooling(x, (16, 16), padding=8)))(images)
    assert left == [True] * 7


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is here")
def test_on_a_card(monkeypatch):
    monkeypatch.setattr(triton_kernels, "SHARE", SHARE)
    found = {str(more): max(off(more, device="cuda")) for more in CONVOLUTIONS}
    found["many channels"] = max(off({"padding": 1}, channels=68, device="cuda"))
    found["the same images for all"] = max(off({"padding": 1}, shared=True, device="cuda"))
    assert {name: value for name, value in found.items() if value > BOUND} == {}
    assert [more for more in POOLINGS if not equal(more, "cuda")] == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is here")
def test_runs_on_a_card():
    """float32: proven, recorded, and repeated to the bit."""

    def made(kernels: str) -> Experiment:
        plan = {"device": "cuda", "dtype": "float32", "kernels": kernels, "block": 3}
        return few("scaffold", WORKLOAD, ROUNDS, engine=plan)

    watch = Watch()
    found = run(made("triton"), observers=[watch])
    assert "plan: blocks of 3 clients, triton kernels (as given)" in watch.told
    assert not [text for text in watch.told if "replayed" in text or "deterministic" in text]
    same(run(made("triton")), found)
    plain = run(made("torch"))
    for a, b in zip(found.model.values(), plain.model.values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)  # some steps of rounding at 2^-24

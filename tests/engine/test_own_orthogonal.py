"""Newton-Schulz iterations of the native kernel agree with those of the method, for one client and for a block.
TOLERANCE as in test_kernels; but Polar Express multiplies small singular values, and their rounding errors, by up to 8
in each iteration."""

from __future__ import annotations

import time

import pytest
import torch
from torch.func import vmap

from fedfleet.algorithms.parts.orthogonal import SCHEMES, newton_schulz
from fedfleet.engine import run
from fedfleet.engine.kernels import operators
from fedfleet.engine.kernels.operators import method_kernels

from .test_kernels import lenet

TOLERANCE = {scheme: 1e-4 if "polar" in scheme else 2e-5 for scheme in SCHEMES}
SHAPES = [(1, 5), (7, 7), (6, 25), (10, 84), (84, 120), (66, 65), (120, 401), (133, 64)]

pytestmark = pytest.mark.usefixtures("own_kernels")


@pytest.mark.parametrize("iterations", [0, 1, 4, 5])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("shape", SHAPES)
def test_iterations_are_torchs(shape, scheme, iterations):
    m = torch.randn(3, *shape, generator=torch.Generator().manual_seed(sum(shape)))
    expected = newton_schulz(m.double(), scheme, iterations)
    with method_kernels("native"):
        alone = torch.stack([newton_schulz(one, scheme, iterations) for one in m])
        block = vmap(lambda one: newton_schulz(one, scheme, iterations))(m)
    for own in (alone, block):
        assert float((own - expected).abs().max() / expected.abs().max()) < TOLERANCE[scheme]


def test_they_are_used_inside_only_and_for_float32_only():
    m = torch.randn(20, 31)
    expected = newton_schulz(m, "jordan", 5)
    with method_kernels("native"):
        assert not torch.equal(newton_schulz(m, "jordan", 5), expected)
        assert torch.equal(
            newton_schulz(m.double(), "jordan", 5), newton_schulz(m.double(), "jordan", 5, torch.float64)
        )
        halves = newton_schulz(m, "jordan", 5, torch.bfloat16)
    assert torch.equal(newton_schulz(m, "jordan", 5), expected)
    assert torch.equal(newton_schulz(m, "jordan", 5, torch.bfloat16), halves)


def test_numbers_below_the_smallest_normal_one_take_no_longer_and_stay_torchs_outside():
    """Rows of tiny numbers, such as the momentum of dead units. They had taken ten times as long as others."""
    m = torch.randn(120, 400, generator=torch.Generator().manual_seed(0))
    tiny = m * torch.logspace(0, -38, 120).unsqueeze(1)
    expected = newton_schulz(tiny.double(), "classic", 5)

    def seconds(x):
        times = []
        for _ in range(9):
            began = time.process_time()
            newton_schulz(x, "classic", 5)
            times.append(time.process_time() - began)
        return min(times)

    with method_kernels("native"):
        own = newton_schulz(tiny, "classic", 5)
        assert seconds(tiny) < 3 * seconds(m)
    assert float((own - expected).abs().max() / expected.abs().max()) < TOLERANCE["classic"]
    assert float(torch.tensor(1e-38) * 0.1) > 0


def test_matrices_that_fill_no_cache_are_torchs(monkeypatch):
    m = torch.randn(20, 31)
    expected = newton_schulz(m, "jordan", 5)
    monkeypatch.setattr(operators, "LARGEST_MATRIX", m.numel() - 1)
    with method_kernels("native"):
        assert torch.equal(newton_schulz(m, "jordan", 5), expected)


def muon(**engine):
    made = lenet(**engine)
    method = {"name": "fedmuon_bc", "matrix_lr": 0.01, "vector_lr": 0.05}
    return type(made).model_validate({**made.model_dump(), "method": method})


def test_a_run_with_own_kernels_is_the_run_with_torchs():
    own, torchs = (run(muon(kernels=kernels)).model for kernels in ("chain", "torch"))
    for name, value in torchs.items():
        assert float((own[name] - value).abs().max() / value.abs().max()) < 1e-5

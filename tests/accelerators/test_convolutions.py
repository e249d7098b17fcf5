"""Convolutions of a block as batched products, and the layers between them: they compute the same, and are proven on
the data of a run."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import vmap
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from fedfleet.engine.api import run
from fedfleet.engine.kernels import block_convolutions
from fedfleet.engine.kernels.agreement import Disagreement
from fedfleet.engine.kernels.block_convolutions import Products, as_product
from fedfleet.engine.kernels.recorded_visit import PROVEN_ROUNDS, VisitRecorder
from fedfleet.engine.planning.kernel_proof import prove
from fedfleet.engine.run_spec import RunSpec
from fedfleet.workloads.workload import Model

from ..faults.runs import same
from ..test_conformance import Few, alike, few
from .tape import record_on_tape


@dataclass(frozen=True)
class Three(Model):
    """A convolution with a bias and max pooling, one with groups, and one with a stride and without a bias."""

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        first = [nn.Flatten(), nn.Unflatten(-1, (1, 8, 8)), nn.Conv2d(1, 4, 3, padding="same"), nn.ReLU()]
        first += [nn.MaxPool2d(2, 1)]
        rest = [nn.Conv2d(4, 4, 3, groups=2), nn.ReLU(), nn.Conv2d(4, 6, 3, stride=2, bias=False), nn.Flatten()]
        return nn.Sequential(*first, *rest, nn.Linear(24, classes))


WORKLOAD = Few(model=Three())


@pytest.fixture
def on_the_processor(monkeypatch):
    """Runs on the processor may have products, and record their steps on a tape."""
    monkeypatch.setattr(Products, "why_not", lambda self, run: "")
    monkeypatch.setattr(Products, "recorder", lambda self: VisitRecorder(record_on_tape))


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"stride": 2},
        {"padding": 1},
        {"padding": "same"},
        {"padding": "same", "dilation": (1, 3)},
        {"padding": "valid", "groups": 2},
        {"groups": 4, "padding": (2, 1)},
        {"stride": (2, 1), "padding": (0, 2), "dilation": 2, "groups": 2},
        {"stride": 5},
    ],
    ids=str,
)
@pytest.mark.parametrize("biased", [True, False])
def test_a_product_is_the_convolution(more, biased):
    """float64: the same sums in another order. And a second time to the bit."""
    draw = torch.Generator().manual_seed(0)
    shapes = [(3, 2, 4, 9, 8), (3, 8, 4 // more.get("groups", 1), 3, 2), (3, 8)][: 3 if biased else 2]
    tensors = [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes]

    def gradients(form: Any) -> list[torch.Tensor]:
        leaves = [tensor.requires_grad_() for tensor in tensors]
        y = vmap(lambda *parts: form(*parts, **more))(*leaves)
        return [y, *torch.autograd.grad(y, leaves, y.detach())]

    own = gradients(as_product)
    for a, b, again in zip(own, gradients(torch.conv2d), gradients(as_product), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
        assert torch.equal(a, again)


def test_one_product_takes_the_place_of_all_groups(on_the_processor):
    """No convolution is left in a block, and no kernel for each client or image."""
    x, weight = torch.randn(3, 2, 4, 9, 8), torch.randn(3, 8, 4, 3, 2, requires_grad=True)
    with Noted() as noted, Products().around_losses():
        vmap(lambda x, w: torch.conv2d(x, w, padding=1))(x, weight).sum().backward()
    assert not any("conv" in name for name in noted.names)
    assert noted.names.count("aten.bmm.default") == 2  # the result, and the gradient of the weights
    assert noted.names.count("aten.unfold_backward.default") == 0  # the images need none
    assert len(noted.names) < 60


@pytest.mark.parametrize("biased", [True, False])
def test_a_linear_layer_of_a_block_is_torchs(biased):
    """float64: the same sums in another order. And a second time to the bit. No gradient in the weights is copied."""
    draw = torch.Generator().manual_seed(0)
    shapes = [(3, 5, 7), (3, 4, 7), (3, 4)][: 3 if biased else 2]
    leaves = [torch.randn(shape, generator=draw, dtype=torch.float64).requires_grad_() for shape in shapes]

    def gradients(around: Any) -> list[torch.Tensor]:
        with around:
            y = vmap(lambda x, weight, *bias: F.linear(x, weight, bias[0] if bias else None))(*leaves)
        return [y, *torch.autograd.grad(y, leaves, torch.sin(y.detach()))]

    own = gradients(Products().around_losses())
    for a, b, again in zip(own, gradients(nullcontext()), gradients(Products().around_losses()), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
        assert torch.equal(a, again)
    assert own[2].is_contiguous()


@pytest.mark.parametrize("more", [{}, {"stride": 1}, {"padding": 1, "ceil_mode": True}, {"dilation": 2}], ids=str)
def test_pooling_behind_a_product_copies_nothing_and_has_torchs_bits(more):
    """Of the many numbers that are the largest in their window, the same one has the gradient."""
    draw = torch.Generator().manual_seed(0)
    products = torch.randint(0, 3, (3, 4, 2, 9, 9), generator=draw).double().requires_grad_()  # channels, examples

    def gradients(around: Any) -> list[torch.Tensor]:
        with Noted() as noted, around:
            y = vmap(lambda x: F.max_pool2d(x.transpose(0, 1), 2, **more))(products)
        names.append(noted.names)
        return [y, *torch.autograd.grad(y, [products], torch.arange(y.numel()).view(y.shape).double())]

    names: list[list[str]] = []
    for a, b in zip(gradients(Products().around_losses()), gradients(nullcontext()), strict=True):
        assert torch.equal(a, b)
    own, torchs = names
    assert "aten.clone.default" not in own
    assert "aten.clone.default" in torchs


class Noted(TorchDispatchMode):
    """Notes the operations that are started."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def with_kernels(name: str, rounds: int = 3) -> Any:
    made = few("scaffold", WORKLOAD, rounds)
    return made.model_copy(update={"engine": made.engine.model_copy(update={"kernels": name})})


def test_a_run_with_products(monkeypatch, on_the_processor):
    """All three convolutions, and steps that are replayed to the same bits."""
    shapes = []

    def noted(input: torch.Tensor, weight: torch.Tensor, *given: Any) -> torch.Tensor:
        shapes.append(tuple(weight.shape))
        return as_product(input, weight, *given)

    monkeypatch.setattr(block_convolutions, "as_product", noted)
    rounds = PROVEN_ROUNDS + 1
    found = run(with_kernels("products", rounds))
    assert set(shapes) == {(4, 1, 3, 3), (4, 2, 3, 3), (6, 4, 3, 3)}
    alike(found, run(with_kernels("torch", rounds)))
    monkeypatch.setattr(Products, "recorder", lambda self: None)
    same(found, run(with_kernels("products", rounds)))


def test_products_that_compute_something_else_are_refused(monkeypatch, on_the_processor):
    run_spec = RunSpec.of("run", few("scaffold", WORKLOAD, engine={"dtype": "float32"}))
    prove(run_spec, run_spec.split(), Products())
    monkeypatch.setattr(block_convolutions, "as_product", lambda *given: as_product(*given) * 1.001)
    with pytest.raises(Disagreement, match=r"in a block .* off torch's"):
        prove(run_spec, run_spec.split(), Products())


def test_only_convolutions_of_a_clients_own_weights():
    x, weight = torch.randn(2, 1, 4, 4), torch.randn(1, 1, 3, 3)
    assert block_convolutions.of_a_block(x, weight) is None
    own: Any = block_convolutions.of_a_block
    assert vmap(lambda w: own(x, w))(weight.expand(2, *weight.shape)).shape == (2, 2, 1, 2, 2)

"""Convolutions of a block as batched products: they compute the same, are chosen by measurement, and proven before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import vmap

from fedfleet.engine.api import run
from fedfleet.engine.kernels import block_convolutions
from fedfleet.engine.kernels.block_convolutions import Arguments, as_product, convolutions_by, with_products
from fedfleet.engine.kernels.cuda_graph import Graph
from fedfleet.engine.kernels.torchs import Torch
from fedfleet.engine.planning import autotune
from fedfleet.engine.planning.autotune import is_the_same, plan_with_products
from fedfleet.engine.planning.execution_plan import parse_plan
from fedfleet.engine.run_spec import ExecutionPlan, RunSpec
from fedfleet.workloads.workload import Model

from ..test_conformance import Few, alike, few


@dataclass(frozen=True)
class Two(Model):
    """A convolution with a bias, one with groups, and one with a stride and without a bias."""

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        first = [nn.Flatten(), nn.Unflatten(-1, (1, 8, 8)), nn.Conv2d(1, 4, 3, padding=1), nn.ReLU()]
        rest = [nn.Conv2d(4, 4, 3, groups=2), nn.ReLU(), nn.Conv2d(4, 6, 3, stride=2, bias=False), nn.Flatten()]
        return nn.Sequential(*first, *rest, nn.Linear(24, classes))


WORKLOAD = Few(model=Two())


@pytest.mark.parametrize(
    "more",
    [{}, {"stride": 2}, {"padding": 1}, {"stride": (2, 1), "padding": (0, 2), "dilation": 2}],
    ids=["plain", "stride", "padding", "all"],
)
@pytest.mark.parametrize("biased", [True, False])
def test_a_product_is_the_convolution(more, biased):
    """float64: the same sums in another order."""
    draw = torch.Generator().manual_seed(0)
    shapes = [(3, 2, 4, 9, 8), (3, 5, 4, 3, 2), (3, 5)][: 3 if biased else 2]
    tensors = [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes]

    def gradients(form: Any) -> list[torch.Tensor]:
        leaves = [tensor.requires_grad_() for tensor in tensors]
        y = vmap(lambda *parts: form(*parts))(*leaves)
        return [y, *torch.autograd.grad(y, leaves, y.detach())]

    own = gradients(lambda *parts: as_product(Arguments(*parts, **more)))
    torchs = gradients(lambda *parts: torch.conv2d(*parts, **more))
    for a, b in zip(own, torchs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def with_kernels(name: str) -> Any:
    made = few("scaffold", WORKLOAD, 3)
    return made.model_copy(update={"engine": made.engine.model_copy(update={"kernels": name})})


def test_a_run_with_products(monkeypatch):
    """The second of the two convolutions without groups. A client alone has no block, and no product."""
    shapes = []

    def noted(given: Arguments) -> torch.Tensor:
        shapes.append(tuple(given.weight.shape))
        return as_product(given)

    monkeypatch.setattr(block_convolutions, "as_product", noted)
    found = run(with_kernels("torch+products:1"))
    assert set(shapes) == {(6, 4, 3, 3)}
    alike(found, run(with_kernels("torch")))


def test_layers_are_chosen_one_by_one(monkeypatch):
    """By the times of both forms; here those of a clock that finds products quicker for inputs of four channels."""

    def seconds(form: Any, given: Arguments) -> float:
        return 1.0 if (form is as_product) == (given.input.shape[2] == 4) else 2.0

    monkeypatch.setattr(autotune, "seconds_of", seconds)
    made = few("scaffold", WORKLOAD, engine={"dtype": "float32"})
    run_spec = RunSpec.of("run", made)
    assert plan_with_products(run_spec, run_spec.split(), ExecutionPlan(3, "graph")) == (3, "graph+products:1")
    monkeypatch.setattr(autotune, "seconds_of", lambda form, given: 1.0)
    assert plan_with_products(run_spec, run_spec.split(), ExecutionPlan(3, "graph")) is None


def test_times_are_measured():
    run_spec = RunSpec.of("run", few("scaffold", WORKLOAD))
    for given in autotune.convolutions(run_spec, run_spec.split(), ExecutionPlan(3, "torch")):
        assert given.input.shape[:2] == (2, 4)  # two blocks of the cohort of four
        assert autotune.seconds_of(as_product, given) > 0
        assert is_the_same(given)


def test_a_product_that_computes_something_else_is_not_used(monkeypatch):
    monkeypatch.setattr(autotune, "as_product", lambda given: as_product(given) * 1.001)
    monkeypatch.setattr(autotune, "is_quicker", lambda given: True)
    run_spec = RunSpec.of("run", few("scaffold", WORKLOAD))
    assert plan_with_products(run_spec, run_spec.split(), ExecutionPlan(3, "torch")) is None


def test_names_of_kernels():
    assert with_products("graph", [0, 2]) == "graph+products:0,2"
    run_spec = RunSpec.of("run", few("scaffold"))
    assert run_spec.kernels_named("graph+products:0,2") == Graph((0, 2))
    assert str(Torch((0, 2))) == "torch+products:0,2"
    assert parse_plan(run_spec, {"block": 3, "kernels": "torch+products:10"}) == (3, "torch+products:10")
    for wrong in ("chain+products:1", "graph+products:", "torch+products:a"):
        with pytest.raises(ValueError, match="kernels"):
            parse_plan(run_spec, {"block": 3, "kernels": wrong})


def test_only_plain_convolutions_of_a_clients_own_weights():
    x, weight, numbers = torch.randn(2, 1, 4, 4), torch.randn(1, 1, 3, 3), list[int]()
    with convolutions_by(lambda number, given: numbers.append(number)):
        torch.conv2d(x, weight)
        vmap(lambda w: torch.conv2d(x, w, padding="same"))(weight.expand(2, *weight.shape))
        assert numbers == []
        vmap(lambda w: torch.conv2d(x, w))(weight.expand(2, *weight.shape))
        assert numbers == [0]

"""Images with their channels last in memory: the same convolutions within rounding, the same bits on both backends, and
torch's own layout wherever a network does not bear another one.

TOLERANCE: float32 sums in another order, relative to the largest entry, as in test_kernels.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn import functional as F

from fedfleet.engine import run
from fedfleet.engine.config.schema import Experiment, experiment
from fedfleet.engine.errors import ConfigError
from fedfleet.engine.kernels.agreement import Disagreement
from fedfleet.engine.kernels.channels_last import ChannelsLast, pays
from fedfleet.engine.kernels.operators import Native
from fedfleet.engine.planning import execution_plan, kernel_proof
from fedfleet.engine.run_spec import ExecutionPlan, RunSpec
from fedfleet.workloads.data.digits import Digits
from fedfleet.workloads.models.norms import BatchNorm
from fedfleet.workloads.partitions.standard import Iid

from .setups import Built
from .test_kernels import apart, drawn, gradients

TOLERANCE = 1e-5


def normalised(*end: nn.Module) -> Callable[[], nn.Module]:
    """Two convolutions with BatchNorm. end: the modules after them, which take images 6 x 4 x 4."""
    return lambda: nn.Sequential(
        *(nn.Conv2d(1, 4, 3, padding=1, bias=False), BatchNorm(4), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(4, 6, 3, padding=1), BatchNorm(6), nn.ReLU()),
        *(end or (nn.Flatten(),)),
        nn.Linear(96, 10),
    )


class AsOneRow(nn.Module):
    """Flattens by a view, which only images with their channels first have."""

    def forward(self, x: Tensor) -> Tensor:
        return x.view(len(x), -1)


class InMemory(nn.Module):
    """Flattens in the order in which the numbers lie in memory."""

    def forward(self, x: Tensor) -> Tensor:
        return x.as_strided((len(x), x[0].numel()), (x[0].numel(), 1))


class Standardised(nn.Conv2d):
    """Convolves with weights of mean 0, which it computes by a view of the weights."""

    def forward(self, input: Tensor) -> Tensor:
        flat = self.weight.view(len(self.weight), -1)
        weight = (flat - flat.mean(1, keepdim=True)).view(self.weight.shape)
        return F.conv2d(input, weight, self.bias, self.stride, self.padding)


def asked(
    network: Callable[[], nn.Module], method: Any = "fedavg", local: dict[str, int] | None = None, **engine: Any
) -> Experiment:
    return experiment(
        {
            "workload": Digits(Built(network), Iid()),
            "method": {"name": method, "rule": {"name": "sgd", "lr": 0.1}},
            "federation": {"clients": 12, "cohort": 8, "rounds": 3, "local": local or LOCAL_WORK[0]},
            "engine": {"backend": "local", "block": 1, "kernels": "channels_last", **engine},
            "tracking": {"uri": "none"},
        }
    )


def proven(network: Callable[[], nn.Module], local: dict[str, int] | None = None) -> None:
    run_spec = RunSpec.of("run", asked(network, local=local))
    split = run_spec.split()
    kernel_proof.prove(run_spec, split, ChannelsLast())


# --- convolutions -----------------------------------------------------------------------------------------------------
CONVOLUTIONS: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "one input channel": ((5, 1, 9, 7), (4, 1, 3, 3), {"padding": 1}),
    "several": ((5, 3, 9, 7), (4, 3, 3, 3), {"padding": (1, 0)}),
    "strided": ((5, 3, 9, 7), (4, 3, 3, 2), {"stride": 2}),
    "dilated, in groups": ((5, 4, 9, 7), (8, 2, 3, 3), {"groups": 2, "dilation": 2, "padding": "same"}),
    "of one pixel": ((5, 4, 1, 1), (3, 4, 1, 1), {}),
    "large patches": ((5, 40, 9, 7), (4, 40, 3, 3), {"padding": 1}),
    "large patches, strided": ((5, 40, 9, 7), (4, 40, 3, 3), {"stride": 2}),
    "large patches, padding by name": ((5, 40, 9, 7), (4, 40, 3, 3), {"padding": "same"}),
    "large patches, in pairs": ((5, 40, 9, 7), (4, 40, 3, 3), {"padding": (1, 1)}),
    "by minimal filtering": ((5, 20, 12, 8), (33, 20, 3, 3), {"padding": 1}),
    "by minimal filtering, odd sides": ((3, 16, 17, 9), (17, 16, 3, 3), {"padding": 1}),
    "by minimal filtering, without padding": ((3, 17, 10, 16), (16, 17, 3, 3), {}),
    "by minimal filtering, wide padding": ((3, 32, 6, 4), (16, 32, 3, 3), {"padding": 2}),
    "by minimal filtering, one tile": ((2, 16, 2, 2), (70, 16, 3, 3), {"padding": 1}),
    "by minimal filtering, many tiles": ((40, 100, 8, 8), (120, 100, 3, 3), {"padding": 1}),
    "of 3 x 3, for which it does not pay": ((5, 40, 3, 3), (40, 40, 3, 3), {"padding": 1}),
}


@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_convolutions_are_torchs(case: str):
    x_shape, weight_shape, options = CONVOLUTIONS[case]
    x, weight, bias = drawn(*x_shape), drawn(*weight_shape), drawn(weight_shape[0])

    def convolve(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.conv2d(x, weight, bias, **options)

    expected = gradients(convolve, x, weight, bias)
    with ChannelsLast().around_losses():
        y = convolve(x, weight, bias)
        named = F.conv2d(weight=weight, input=x, bias=bias, **options)
        found = gradients(convolve, x, weight, bias)
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(named, y)
    for own, value in zip(found, expected, strict=True):
        assert own.shape == value.shape
        assert apart(own, value) < TOLERANCE


PARTS: dict[str, Callable[[Tensor], Tensor]] = {
    "some channels": lambda x: x[:, :20],
    "half of the channels": lambda x: x.chunk(2, 1)[1],
    "every second channel": lambda x: x[:, ::2],
    "cut edges": lambda x: x[:, :20, 1:-1, 1:-1],
    "every second pixel": lambda x: x[:, :20, ::2, ::2],
    "turned": lambda x: x[:, :20].flip(1),
    "on their side": lambda x: x[:, :20].mT,
    "one image many times": lambda x: x[:1, :20].expand(3, -1, -1, -1),
}


@pytest.mark.parametrize("part", PARTS)
def test_parts_of_images_are_not_read_as_whole_ones(part: str):
    """The order of their numbers in memory is that of images with their channels last, with gaps between them."""
    x, weight, bias = drawn(3, 40, 16, 16), drawn(17, 20, 3, 3), drawn(17)

    def convolve(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        images = x.contiguous(memory_format=torch.channels_last)
        return F.conv2d(PARTS[part](images), weight, bias, padding=1)

    expected = gradients(convolve, x, weight, bias)
    with ChannelsLast().around_losses():
        found = gradients(convolve, x, weight, bias)
    assert all(apart(own, value) < TOLERANCE for own, value in zip(found, expected, strict=True))


def test_parts_of_kernels_are_not_read_as_whole_ones():
    x, weight = drawn(3, 20, 8, 8), drawn(17, 20, 5, 5)

    def convolve(x: Tensor, weight: Tensor) -> Tensor:
        return F.conv2d(x, weight.contiguous(memory_format=torch.channels_last)[:, :, 1:4, 1:4], padding=1)

    expected = gradients(convolve, x, weight)
    with ChannelsLast().around_losses():
        found = gradients(convolve, x, weight)
    assert all(apart(own, value) < TOLERANCE for own, value in zip(found, expected, strict=True))


@pytest.mark.parametrize("kernels", [Native(), ChannelsLast()])
def test_second_derivatives_are_refused(kernels: Any):
    """Autograd would give zeros for them, with options that the engine sets."""
    x, weight = drawn(2, 20, 8, 8).requires_grad_(), drawn(32, 20, 3, 3).requires_grad_()
    with kernels.around_losses():
        y = F.conv2d(x, weight, padding=1)
    with pytest.raises(RuntimeError, match="second derivatives are asked for"):
        torch.autograd.grad(y.square().sum(), x, create_graph=True)


def test_which_convolutions_are_computed_by_minimal_filtering():
    asked = {case for case in CONVOLUTIONS if case.startswith("by minimal filtering")}
    found = {
        case
        for case, (x, weight, options) in CONVOLUTIONS.items()
        if set(options) <= {"padding"}
        and isinstance(options.get("padding", 0), int)
        and pays(torch.empty(x), torch.empty(weight), options.get("padding", 0))
    }
    assert found == asked
    assert not pays(torch.empty(0, 20, 12, 8), torch.empty(33, 20, 3, 3), 1)
    assert not pays(torch.empty(2, 20, 1, 1), torch.empty(33, 20, 3, 3), 0)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", ["images", "weights", "gradient"])
def test_minimal_filtering_does_not_lose_what_is_not_finite(where: str, value: float):
    """A run that diverges is recognised by it. Where the definition has infinity, differences may have NaN."""
    tensors = {"images": drawn(3, 20, 12, 8), "weights": drawn(33, 20, 3, 3), "gradient": drawn(3, 33, 12, 8)}
    tensors[where].view(-1)[7] = value
    x, weight = (tensors[name].requires_grad_() for name in ("images", "weights"))
    with ChannelsLast().around_losses():
        y = F.conv2d(x, weight, padding=1)
    of_x, of_weight = torch.autograd.grad(y, (x, weight), tensors["gradient"])
    assert y.isfinite().all() == (where == "gradient")
    assert of_x.isfinite().all() == (where == "images")
    assert of_weight.isfinite().all() == (where == "weights")


def test_the_error_of_minimal_filtering_is_not_larger_than_torchs():
    for case in ("by minimal filtering", "by minimal filtering, many tiles"):
        x_shape, weight_shape, options = CONVOLUTIONS[case]
        x, weight = drawn(*x_shape), drawn(*weight_shape)

        def convolve(x: Tensor, weight: Tensor, options: dict[str, Any] = options) -> Tensor:
            return F.conv2d(x, weight, **options)

        exact, torchs = gradients(convolve, x.double(), weight.double()), gradients(convolve, x, weight)
        with ChannelsLast().around_losses():
            own = gradients(convolve, x, weight)
        for found, theirs, wanted in zip(own, torchs, exact, strict=True):
            assert apart(found.double(), wanted) < 2 * apart(theirs.double(), wanted) + 1e-7


def test_the_layout_lasts_until_the_end():
    layouts = []
    network = normalised()()
    for module in network:
        module.register_forward_hook(
            lambda module, given, y: layouts.append(y.ndim == 4 and y.stride(1) == 1 and y.shape[1] > 1)
        )
    network(drawn(3, 1, 8, 8))
    assert not any(layouts)
    layouts.clear()
    with ChannelsLast().around_losses():
        network(drawn(3, 1, 8, 8))
    assert layouts == [*[True] * 7, False, False]  # what is flat has no channels


def test_what_is_no_batch_of_images_is_left_alone():
    image, line, solid = drawn(3, 9, 9), drawn(2, 3, 9), drawn(2, 3, 5, 5, 5)
    with ChannelsLast().around_losses():
        assert torch.equal(F.conv2d(image, drawn(4, 3, 3, 3)), F.conv2d(image, drawn(4, 3, 3, 3)))
        assert F.conv1d(line, drawn(4, 3, 3)).is_contiguous()
        assert F.conv3d(solid, drawn(4, 3, 3, 3, 3)).is_contiguous()


def test_blocks_of_clients_have_the_bits_of_torch():
    x, weight = drawn(3, 4, 2, 9, 9), drawn(3, 5, 2, 3, 3)
    expected = gradients(vmap(F.conv2d), x, weight)
    with ChannelsLast().around_losses():
        found = gradients(vmap(F.conv2d), x, weight)
    assert all(torch.equal(own, value) for own, value in zip(found, expected, strict=True))


# --- proofs -----------------------------------------------------------------------------------------------------------
def standardised() -> nn.Module:
    return nn.Sequential(Standardised(1, 4, 3), nn.ReLU(), Standardised(4, 4, 3), nn.Flatten(), nn.Linear(64, 10))


@pytest.mark.parametrize("network", [normalised(), standardised], ids=["normalised", "a view of weights"])
def test_a_network_that_bears_it_is_proven(network: Callable[[], nn.Module]):
    proven(network)


@pytest.mark.parametrize(
    ("network", "why"),
    [
        (normalised(AsOneRow()), "view"),
        (normalised(InMemory()), "is .* off torch's"),
    ],
    ids=["a view of images", "the order in memory"],
)
def test_a_network_that_does_not_is_found_out(network: Callable[[], nn.Module], why: str):
    with pytest.raises(Disagreement, match=why):
        proven(network)
    with pytest.raises(ConfigError, match=r"engine\.kernels=channels_last must compute what torch's .*; choose torch"):
        run(asked(network))
    automatic = RunSpec.of("run", asked(network, kernels="auto"))
    assert ChannelsLast() not in execution_plan.kernels_to_try(automatic, automatic.split())
    assert run(asked(network, kernels="auto")).model_sha256 == run(asked(network, kernels="torch")).model_sha256


LOCAL_WORK: list[dict[str, int]] = [{"steps": 3, "batch": 16}, {"epochs": 1, "batch": 16}, {"steps": 3, "batch": 500}]
"""Batches that are all full, batches of which the last one is short, and batches that are larger than a client."""


@pytest.mark.parametrize("local", LOCAL_WORK)
def test_normalisation_is_proven_as_clients_alone_compute_it(local: dict[str, int]):
    """Without padding, which batch normalisation computes otherwise."""
    proven(normalised(), local)


class OtherwiseInEvaluations(nn.Module):
    """Has a layout of its own in evaluations only."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1) if self.training else InMemory()(x)


def test_evaluations_are_proven():
    with pytest.raises(Disagreement, match=r"loss in an evaluation is .* off torch's"):
        proven(normalised(OtherwiseInEvaluations()))


def test_they_are_for_float32_on_processors():
    with pytest.raises(ConfigError, match=r"engine\.kernels: must fit the run: they are for float32"):
        run(asked(normalised(), dtype="float64"))


def test_they_are_for_clients_that_train_alone(tmp_path: Path):
    with pytest.raises(
        ConfigError, match=r"they are for clients that train alone, not for engine\.block=4 \(choose block=1\)"
    ):
        run(asked(normalised(), block=4))
    run(asked(normalised(), block="auto"), tmp_path)
    assert json.loads((tmp_path / "plan.json").read_text())["block"] == 1
    assert len(run(asked(normalised(), block=4, vectorise=False)).rows) == 3


# --- plans ------------------------------------------------------------------------------------------------------------
def candidates(network: Callable[[], nn.Module], **engine: Any) -> list[int]:
    """The blocks for which channels last is a candidate."""
    plans = execution_plan.candidates(RunSpec.of("run", asked(network, **engine)))
    return [plan.block for plan in plans if plan.kernels == "channels_last"]


def test_candidates():
    flat = lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10))  # noqa: E731
    unknown = {"block": "auto", "kernels": "auto"}
    assert candidates(normalised(), **unknown) == [1]  # under vmap the kernels would be torch's
    assert candidates(normalised(), **{**unknown, "block": 2}) == []
    assert candidates(normalised(), block="auto") == [1]
    assert candidates(flat, **unknown) == []
    assert candidates(normalised(), **unknown, dtype="float64") == []


@pytest.mark.usefixtures("own_kernels")
def test_not_beside_a_chain():
    def chain() -> nn.Module:
        return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))

    assert candidates(chain, block="auto", kernels="auto") == []


# --- runs -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("method", ["fedavg", "scaffold"])
def test_whole_runs_agree_with_torch(method: str, tmp_path: Path):
    own = run(asked(normalised(), method), tmp_path / "own")
    torchs = run(asked(normalised(), method, kernels="torch"))
    plan = json.loads((tmp_path / "own" / "plan.json").read_text())
    assert (plan["block"], plan["kernels"]) == (1, "channels_last")
    for a, b in zip(own.rows, torchs.rows, strict=True):
        assert a["train/loss"] == pytest.approx(b["train/loss"], rel=1e-4)


WORK = {
    "plugins": ["fedfleet.tune.bench.works"],
    "workload": "w4",
    "method": {"name": "fedavg", "rule": {"name": "momentum", "lr": 0.05}},
    "federation": {"clients": 40, "cohort": 4, "rounds": 2, "local": {"steps": 2, "batch": 8}},
    "tracking": {"uri": "none"},
}


def test_both_backends_have_the_same_bits(ray_here: Any, tmp_path: Path):
    found = set()
    for number, more in enumerate(({"backend": "local"}, {"backend": "ray", "workers": 2})):
        engine = {"block": 1, "kernels": "channels_last", **more}
        found.add(run(experiment({**WORK, "engine": engine}), tmp_path / str(number)).model_sha256)
    assert len(found) == 1


def test_a_measurement_may_take_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What is measured decides: here the times are given, with channels last as the quickest."""
    monkeypatch.setattr(execution_plan, "WORTH", 1)
    run_spec = RunSpec.of("run", experiment({**WORK, "engine": {"backend": "local"}}), str(tmp_path))
    quick = ExecutionPlan(1, "channels_last")

    def measure(run_spec: RunSpec, split: Any, plans: list[ExecutionPlan]) -> dict[ExecutionPlan, float]:
        assert quick in plans
        return {plan: 1.0 if plan == quick else 2.0 for plan in plans}

    planned, line = execution_plan.plan_execution(run_spec, run_spec.split(), measure)
    assert planned.execution_plan == quick
    assert line.startswith("plan: blocks of 1 clients, channels_last kernels (measured")

"""Batch normalisation, ReLU and pooling in one pass: torch's numbers and gradients in whatever order a network uses
them, and torch's own kernels wherever the fused ones do not fit.

TOLERANCE: float32 sums in another order, relative to the largest entry, as in test_kernels.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn import functional as F

from fedfleet.engine.kernels import fused_pooling
from fedfleet.engine.kernels.channels_last import ChannelsLast
from fedfleet.engine.kernels.fused_pooling import NormaliseAndPool, Normalised

from .test_kernels import apart, drawn, gradients

TOLERANCE = 1e-5
SHAPES = [(5, 3, 8, 8), (2, 16, 4, 6), (3, 17, 7, 9), (4, 40, 3, 2), (70, 5, 2, 3), (1, 1, 2, 2)]
"""Images (N, C, h, w): channels that fill vectors and that do not, and sides that windows do not fill."""


def images(*shape: int) -> Tensor:
    return drawn(*shape).contiguous(memory_format=torch.channels_last)


def normalise(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.batch_norm(x, None, None, weight, bias, training=True)


def pooled(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.max_pool2d(F.relu(normalise(x, weight, bias)), 2)


def compare(network: Callable[..., Tensor], *tensors: Tensor) -> None:
    """Value and gradients are torch's. The outputs are weighted, as the squares of what is normalised have a constant
    sum, whose gradient is rounding errors alone."""

    def weighted(*given: Tensor) -> Tensor:
        y = network(*given)
        return y * drawn(*y.shape)

    expected = gradients(weighted, *tensors)
    with ChannelsLast().around_losses():
        found = gradients(weighted, *tensors)
    for own, value in zip(found, expected, strict=True):
        assert type(own) is Tensor
        assert own.shape == value.shape
        assert apart(own, value) < TOLERANCE


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of what the fused kernel was called for."""
    seen = []
    real = NormaliseAndPool.apply

    def apply(x: Tensor, *rest: object) -> Tensor:
        seen.append(tuple(x.shape))
        return real(x, *rest)

    monkeypatch.setattr(fused_pooling.NormaliseAndPool, "apply", apply)
    return seen


@pytest.mark.parametrize("shape", SHAPES)
def test_in_one_pass(shape: tuple[int, ...], fused: list[tuple[int, ...]]):
    compare(pooled, images(*shape), drawn(shape[1]), drawn(shape[1]))
    assert fused == [shape]


@pytest.mark.parametrize("shape", SHAPES)
def test_evaluations_use_the_running_statistics(shape: tuple[int, ...], fused: list[tuple[int, ...]]):
    x, weight, bias, mean, variance = images(*shape), *drawn(4, shape[1])
    variance = variance.square()

    def network() -> Tensor:
        y = F.batch_norm(x, mean, variance, weight, bias, training=False)
        return F.max_pool2d(F.relu(y), 2)

    before = mean.clone(), variance.clone()
    expected = network()
    with ChannelsLast().around_losses(), torch.no_grad():
        found = network()
        alone = F.batch_norm(x, mean, variance, weight, bias, training=False)
    assert fused == [shape]
    assert apart(found, expected) < TOLERANCE
    assert apart(alone + 0, F.batch_norm(x, mean, variance, weight, bias)) < TOLERANCE
    assert torch.equal(mean, before[0])
    assert torch.equal(variance, before[1])


def test_gradients_through_the_running_statistics_are_torchs(fused: list[tuple[int, ...]]):
    x, weight, bias, mean, variance = images(3, 4, 6, 6), *drawn(4, 4)
    compare(
        lambda x, weight, bias: F.max_pool2d(F.relu(F.batch_norm(x, mean, variance.square(), weight, bias)), 2),
        *(x, weight, bias),
    )
    assert fused == []


def test_scales_of_zero_and_numbers_that_are_equal(fused: list[tuple[int, ...]]):
    """Windows whose pixels are all equal, or all set to 0, have one pixel that gets the gradient, as in torch."""
    x = images(3, 4, 6, 6).round()
    compare(pooled, x, torch.tensor([0.0, -1.0, 1.0, 2.0]), torch.tensor([1.0, 0.0, -9.0, 9.0]))
    assert fused


def test_a_mean_that_is_large_against_the_deviation():
    """The moments themselves are exact to a few units in the last place; what follows from them is ill-conditioned in
    float32, in torch as well."""
    x = images(20, 6, 14, 14) + 1000
    weight, bias = torch.ones(6), torch.zeros(6)
    with ChannelsLast().around_losses():
        normalised = normalise(x, weight, bias)
    assert isinstance(normalised, Normalised)
    mean, variance = normalised.given[3:5]
    exact = x.double()
    assert torch.allclose(mean.double(), exact.mean((0, 2, 3)), rtol=2e-7)
    assert torch.allclose(variance.double(), exact.var((0, 2, 3), correction=0), rtol=1e-5)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_not_lost(value: float):
    x = images(3, 4, 6, 6)
    x[1, 2, 3, 3] = value
    expected = pooled(x, torch.ones(4), torch.zeros(4))
    with ChannelsLast().around_losses():
        found = pooled(x, torch.ones(4), torch.zeros(4))
    assert not expected.isfinite().all()
    assert torch.equal(found.isfinite(), expected.isfinite())


def test_running_statistics_move_once():
    expected, found = nn.BatchNorm2d(5, momentum=0.3), nn.BatchNorm2d(5, momentum=0.3)
    x = images(4, 5, 6, 6)
    for shift in (0.0, 2.0):
        expected(x + shift)
        with ChannelsLast().around_losses():
            normalised = found(x + shift)
            F.max_pool2d(F.relu(normalised), 2)
            normalised.sum()
    assert torch.allclose(found.running_mean, expected.running_mean, atol=1e-6)
    assert torch.allclose(found.running_var, expected.running_var, rtol=1e-6)


NETWORKS: dict[str, Callable[..., Tensor]] = {
    "nothing follows": normalise,
    "ReLU alone": lambda *given: normalise(*given).relu(),
    "ReLU twice": lambda *given: F.max_pool2d(torch.relu(F.relu(normalise(*given))), 2),
    "ReLU in place": lambda *given: F.max_pool2d(F.relu(normalise(*given), inplace=True), 2),
    "ReLU in place, by its own name": lambda *given: F.max_pool2d(normalise(*given).relu_(), 2),
    "pooling without ReLU": lambda *given: F.max_pool2d(normalise(*given), 2),
    "other windows": lambda *given: F.max_pool2d(F.relu(normalise(*given)), 3, stride=2),
    "with places": lambda *given: F.max_pool2d(F.relu(normalise(*given)), 2, return_indices=True)[0],
    "an addition": lambda x, *given: F.max_pool2d(F.relu(x + normalise(x, *given)), 2),
    "by a list": lambda *given: torch.cat([F.relu(normalise(*given)), normalise(*given)]),
    "its shape": lambda *given: normalise(*given).reshape(-1, normalise(*given).shape[1]),
    "indexed": lambda *given: normalise(*given)[0, :, 1:],
    "in another dtype": lambda *given: normalise(*given).double(),
    "twice": lambda *given: pooled(pooled(*given).contiguous(memory_format=torch.channels_last), *given[1:]),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_whatever_follows(name: str):
    compare(NETWORKS[name], images(4, 5, 9, 8), drawn(5), drawn(5))


def test_numbers_that_are_used_before_and_after_pooling(fused: list[tuple[int, ...]]):
    def network(*given: Tensor) -> Tensor:
        normalised = normalise(*given)
        rectified = F.relu(normalised)
        return torch.stack([F.max_pool2d(rectified, 2).sum(), rectified.square().sum(), (3 * normalised).sum()])

    compare(network, images(4, 5, 6, 8), drawn(5), drawn(5))
    assert fused


def test_a_relu_in_place_is_one_of_what_was_normalised():
    def network(*given: Tensor) -> Tensor:
        normalised = normalise(*given)
        F.relu(normalised, inplace=True)
        return normalised

    compare(network, images(4, 5, 6, 8), drawn(5), drawn(5))


def test_without_gradients_none_are_recorded():
    x, weight, bias = images(4, 5, 6, 8).requires_grad_(), drawn(5), drawn(5)
    with ChannelsLast().around_losses(), torch.no_grad():
        normalised = normalise(x, weight, bias)
    assert not pooled(x.detach(), weight, bias).requires_grad
    assert not (normalised + 1).requires_grad
    with ChannelsLast().around_losses():
        normalised = normalise(x, weight, bias)
    with torch.no_grad():
        normalised.sum()  # as a hook does that looks at the numbers
    assert (normalised + 1).requires_grad


def test_a_change_of_the_images_is_noticed():
    x = images(4, 5, 6, 8)
    with ChannelsLast().around_losses():
        normalised = normalise(x, drawn(5), drawn(5))
        x.add_(1)
        with pytest.raises(RuntimeError, match="were changed in place after their normalisation"):
            F.max_pool2d(F.relu(normalised), 2)


def test_what_normalises_must_not_change_either():
    mean, variance = drawn(5), drawn(5).abs()
    with ChannelsLast().around_losses(), torch.no_grad():
        normalised = F.batch_norm(images(4, 5, 6, 8), mean, variance, drawn(5), drawn(5))
        variance.add_(1)
        with pytest.raises(RuntimeError, match="were changed in place after their normalisation"):
            normalised.sum()


@pytest.mark.parametrize("change", [lambda y: y.clamp_(max=0.1), lambda y: y.data.mul_(2)], ids=["in place", "data"])
def test_pooling_takes_numbers_that_were_changed(change: Callable[[Tensor], Tensor], fused: list[tuple[int, ...]]):
    x, mean, variance, weight, bias = images(4, 5, 6, 8), drawn(5), drawn(5).abs(), drawn(5), drawn(5)

    def network() -> Tensor:
        rectified = F.relu(F.batch_norm(x, mean, variance, weight, bias))
        change(rectified)
        return F.max_pool2d(rectified, 2)

    with torch.no_grad():
        expected = network()
        with ChannelsLast().around_losses():
            assert apart(network(), expected) < TOLERANCE
    assert not fused


def test_pooling_without_gradients_cuts_them_off():
    """A target that must have no gradient, of images that were normalised with one."""

    def network(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        rectified = F.relu(normalise(x, weight, bias))
        with torch.no_grad():
            target = F.max_pool2d(rectified, 2)
        return F.max_pool2d(rectified.sin(), 2) * target

    compare(network, images(4, 5, 6, 8), drawn(5), drawn(5))


LEFT_ALONE: dict[str, Callable[[], Tensor]] = {
    "in evaluation": lambda: F.batch_norm(images(4, 5, 6, 6), drawn(5), drawn(5).abs(), drawn(5), drawn(5)),
    "plane by plane": lambda: normalise(drawn(4, 5, 6, 6), drawn(5), drawn(5)),
    "rows": lambda: normalise(drawn(6, 5), drawn(5), drawn(5)),
    "without a scale": lambda: F.batch_norm(images(4, 5, 6, 6), None, None, training=True),
    "float64": lambda: normalise(images(4, 5, 6, 6).double(), drawn(5).double(), drawn(5).double()),
}


@pytest.mark.parametrize("case", LEFT_ALONE)
def test_what_torch_computes(case: str):
    with ChannelsLast().around_losses():
        found = LEFT_ALONE[case]()
    assert type(found) is Tensor
    assert torch.equal(found, LEFT_ALONE[case]())


def test_errors_are_torchs():
    with ChannelsLast().around_losses():
        with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
            normalise(images(1, 5, 1, 1), drawn(5), drawn(5))
        with pytest.raises(RuntimeError, match="weight"):
            normalise(images(4, 5, 6, 6), drawn(4), drawn(5))


def test_transformed_functions_are_torchs():
    given = images(4, 5, 6, 6), drawn(5), drawn(5)
    expected = (
        grad(lambda *all: pooled(*all).sum())(*given),
        vmap(pooled)(*(each.expand(2, *each.shape) for each in given)),
    )
    with ChannelsLast().around_losses():
        found = (
            grad(lambda *all: pooled(*all).sum())(*given),
            vmap(pooled)(*(each.expand(2, *each.shape) for each in given)),
        )
    assert all(map(torch.equal, found, expected))

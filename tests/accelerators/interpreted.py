"""Compares the programs in Triton, as its interpreter runs them, with torch's kernels in float64.

    TRITON_INTERPRET=1 python -m tests.accelerators.interpreted [all]

prints, for some cases or for all, the largest difference of each result, in parts of its largest entry; for pooling,
whether the results are the same. Triton reads the variable when it is imported, so that this is a process of its own.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from fedfleet.engine.kernels import triton_kernels

SHARE = 64
"""`triton_kernels.SHARE` here, so that small images need several shares."""
SOME = 2
"""The number of cases that are not for `all`."""
SUMMANDS = 2 * 11 * 10
"""The most summands of a number in the cases: the places of all images in the gradient of a weight."""
BOUND = SUMMANDS**1.5 * 2**-24
"""float32: sums of n products in any order are off by at most n 2^-24 of the sum of the products' sizes, which for
random signs is about sqrt(n) times the largest result."""
CONVOLUTIONS: list[dict[str, Any]] = [
    {"stride": (2, 1), "padding": (0, 2), "dilation": 2, "groups": 2},
    {"padding": 1},
    {},
    {"stride": 2},
    {"padding": "same"},
    {"padding": "same", "dilation": (1, 3)},
    {"padding": "valid", "groups": 2},
    {"groups": 4, "padding": (2, 1)},
    {"stride": 5},
]
POOLINGS: list[dict[str, Any]] = [
    {"kernel_size": 2},
    {"kernel_size": 3, "stride": 2, "padding": 1},
    {"kernel_size": (3, 2), "stride": 1},
    {"kernel_size": 2, "dilation": 2},
]


def gradients(form: Any, more: dict[str, Any], tensors: list[Tensor], dims: tuple[int | None, ...]) -> list[Tensor]:
    """The results of clients under vmap, and their gradients for results as slopes."""
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    y = vmap(lambda *parts: form(*parts, **more), dims)(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, torch.cos(y.detach()))]


def off(
    more: dict[str, Any], biased: bool = True, channels: int = 8, shared: bool = False, device: str = "cpu"
) -> list[float]:
    """How far the results of convolutions are off. channels: of the results. shared: whether all clients have the same
    images."""
    draw = torch.Generator().manual_seed(0)
    images, weights = (2, 2, 4, 9, 8), (2, channels, 4 // more.get("groups", 1), 3, 3)
    shapes = [images[shared:], weights, (2, channels)][: 3 if biased else 2]
    tensors = [torch.randn(shape, generator=draw).to(device) for shape in shapes]
    dims = (None if shared else 0, 0, 0)[: len(tensors)]
    own = gradients(triton_kernels.convolution, more, tensors, dims)
    exact = gradients(torch.conv2d, more, [tensor.double() for tensor in tensors], dims)
    return [float((a - b).abs().max() / b.abs().max()) for a, b in zip(own, exact, strict=True)]


def equal(more: dict[str, Any], device: str = "cpu") -> bool:
    """Whether pooling and its gradient are torch's, among equal numbers and a NaN."""
    images = torch.randn(3, 2, 4, 9, 8, generator=torch.Generator().manual_seed(0)).round()
    images[0, 0, 0, 0, 0] = float("nan")
    images = images.to(device)
    own = gradients(triton_kernels.pooling, more, [images], (0,))
    return all(
        torch.allclose(a, b, rtol=1e-6, atol=0, equal_nan=True)
        for a, b in zip(own, gradients(torch.max_pool2d, more, [images], (0,)), strict=True)
    )


def main() -> None:
    triton_kernels.SHARE = SHARE
    every = sys.argv[1:] == ["all"]
    found: dict[str, Any] = {}
    for number, more in enumerate(CONVOLUTIONS[: None if every else SOME]):
        found[str(more)] = off(more, biased=number % 2 == 1)
    if every:
        found["many channels"] = off({"padding": 1}, channels=68)
    found["the same images for all"] = off({"padding": 1}, shared=True)
    found.update({f"pooling, {more}": equal(more) for more in POOLINGS})
    print(json.dumps(found))


if __name__ == "__main__":
    main()

"""Convolutions with kernels of 3 x 3 by Winograd's minimal filtering, with the channels of images last in memory.

Four outputs beside each other take 16 products per channel instead of 36 (`csrc/winograd.h`). What is left of the
gain, after transforms that only add, depends on how well tiles of 2 x 2 outputs cover an image: `pays` says for which
shapes it is worth it. The sums are those of the definition up to rounding. Its error was never larger than that of
torch's kernels in the shapes of CNN4 and ResNet-18, because sums have fewer terms.

Source: Lavin and Gray 2016, arXiv:1509.09308.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...workloads.models.derivatives import first_derivatives_only
from .library import call

FEWEST_CHANNELS = 16
"""Fewer input or output channels do not fill vectors."""
MOST_SHARE = 0.7
"""Winograd's products as a share of those of the definition, at which the transforms still pay."""


def pays(x: Tensor, weight: Tensor, padding: int) -> bool:
    """Whether the convolution of images x (N, I, h, w) with weight (O, I, k, l), without stride, is faster so."""
    outputs, inputs, *sides = weight.shape
    if sides != [3, 3] or not 0 <= padding <= 2 or min(inputs, outputs) < FEWEST_CHANNELS or x.shape[1] != inputs:
        return False
    height, width = (side + 2 * padding - 2 for side in x.shape[-2:])
    tiles = -(-height // 2) * -(-width // 2)
    return len(x) > 0 and min(height, width) > 0 and 16 * tiles <= MOST_SHARE * 9 * height * width


class MinimalFiltering(torch.autograd.Function):
    """The convolution of images x (N, I, h, w) with weight (O, I, 3, 3), which have their channels last. `padding`: the
    zeros around the images."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, padding: int) -> Tensor:
        ctx.padding, ctx.biased = padding, bias is not None
        ctx.save_for_backward(x, weight)
        y = filtered(x, weight, padding, turned=False)
        return y if bias is None else y.add_(bias.view(-1, 1, 1))

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        gradient = grads[0].contiguous(memory_format=torch.channels_last)
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            of_x = filtered(gradient, weight, 2 - ctx.padding, turned=True)
        if ctx.needs_input_grad[1]:
            of_weight = torch.empty(weight.shape, dtype=weight.dtype)
            outputs, inputs = weight.shape[:2]
            sizes = (len(x), inputs, outputs, *x.shape[-2:], ctx.padding)
            call("winograd_weights", (x, gradient, of_weight), *sizes)
        of_bias = gradient.sum((0, 2, 3)) if ctx.biased else None
        return of_x, of_weight, of_bias, None


def filtered(x: Tensor, weight: Tensor, padding: int, turned: bool) -> Tensor:
    """The convolution of images x (N, I, h, w) that have their channels last. turned: with kernels that are turned by
    180 degrees, from the output channels of the weights to their input channels."""
    outputs = weight.shape[1 if turned else 0]
    height, width = (side + 2 * padding - 2 for side in x.shape[-2:])
    y = torch.empty((len(x), outputs, height, width), dtype=x.dtype, memory_format=torch.channels_last)
    places = (weight.stride(0), weight.stride(1), weight.stride(3))
    call("winograd_forward", (x, weight, y), len(x), x.shape[1], outputs, *x.shape[-2:], padding, *places, int(turned))
    return y

"""Convolutions of one client whose images have their channels last in memory.

torch stores images (B, C, h, w) plane by plane. Its normalisation, ReLU and above all max pooling are faster where the
channels of a pixel lie next to each other, since they then handle whole vectors of channels, and its convolutions are
as fast. A convolution passes the layout of its input on to its result, and so do the operations between convolutions.
So it is enough to bring the inputs of convolutions, and their weights, into this layout: from the first convolution on
all images have it. Convolutions of 3 x 3 are computed by fewer products. What is computed is the same up to rounding.

Convolutions of 3 x 3 have fewer products by Winograd's minimal filtering. Four outputs beside each other take 16
products per channel instead of 36 (`csrc/winograd.h`). What is left of the gain, after transforms that only add,
depends on how well tiles of 2 x 2 outputs cover an image. Its rounding error was never larger than that of torch's
kernels in the shapes of CNN4 and ResNet-18, because sums have fewer terms.

Source: Lavin and Gray 2016, arXiv:1509.09308.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._C._functorch import is_batchedtensor  # pyright: ignore[reportMissingImports]

from ...workloads.models.derivatives import first_derivatives_only
from .contract import Run
from .library import call
from .operators import Native
from .replacements import Replacements, padding_of, supported_alone

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


def conv2d(input: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any, **kwargs: Any) -> Tensor:
    """torch.conv2d, of images and weights that get their channels last."""
    input, weight, padding = channels_last(input), channels_last(weight), padding_of(*args, **kwargs)
    if padding is None or input.ndim != 4 or weight.ndim != 4 or not supported_alone(input, weight, bias):
        return torch.conv2d(input, weight, bias, *args, **kwargs)
    if not pays(input, weight, padding):
        return torch.conv2d(input, weight, bias, padding=padding)
    return MinimalFiltering.apply(input, weight, bias, padding)


REPLACEMENTS: dict[Any, Callable[..., Tensor | None]] = {torch.conv2d: conv2d}
"""Under vmap nothing changes: there the channels of all clients become groups of one convolution."""


def channels_last(tensor: Tensor) -> Tensor:
    """The same images or weights (n, C, h, w) with the channels last in memory and without gaps; others, such as a
    single image (C, h, w), as they are."""
    if tensor.ndim != 4 or is_batchedtensor(tensor):
        return tensor
    last = torch.channels_last
    # `to` passes parts of images on as they are, such as some of their channels. `contiguous` alone would leave images
    # of one pixel with strides from which torch cannot tell the order.
    ordered = tensor.to(memory_format=last)
    return ordered if ordered.is_contiguous(memory_format=last) else ordered.contiguous(memory_format=last)


class ChannelsLast(Native):
    """Torch's kernels for images whose channels are last in memory, for clients that train alone."""

    name: ClassVar[str] = "channels_last"

    def why_not(self, run: Run) -> str:
        engine = run.experiment.engine
        if engine.block not in ("auto", 1) and engine.vectorise:
            return f"for clients that train alone, not for engine.block={engine.block} (choose block=1)"
        return super().why_not(run)

    def is_promising(self, run: Run) -> bool:
        """Whether the loss may convolve images, as the model has a tensor (O, I, k, l)."""
        shapes = (*run.layout.shapes, *(tensor.shape for tensor in run.frozen.values()))
        return any(len(shape) == 4 for shape in shapes) and super().is_promising(run) and not self.why_not(run)

    def suits(self, block: int) -> bool:
        return block == 1

    def around_losses(self) -> AbstractContextManager[Any]:
        return Replacements(REPLACEMENTS)

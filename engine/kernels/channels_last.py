"""Convolutions of one client whose images have their channels last in memory.

torch stores images (B, C, h, w) plane by plane. Its normalisation, ReLU and above all max pooling are faster where the
channels of a pixel lie next to each other, since they then handle whole vectors of channels, and its convolutions are
as fast. A convolution passes the layout of its input on to its result, and so do the operations between convolutions.
So it is enough to bring the inputs of convolutions, and their weights, into this layout: from the first convolution on
all images have it. What is computed is the same up to the order of sums.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_batchedtensor  # pyright: ignore[reportMissingImports]
from torch.overrides import TorchFunctionMode

CHANNELS_LAST = "channels_last"
"""The name of these kernels, as `engine.kernels` gives it."""


class ChannelsLast(TorchFunctionMode):
    """A mode in which `torch.conv2d` gets images and weights with the channels last. Under vmap it changes nothing:
    there the channels of all clients become groups of one convolution."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func is torch.conv2d:
            input, weight, *others = (*args, *(given.pop(name) for name in NAMES[len(args) :] if name in given))
            return func(channels_last(input), channels_last(weight), *others, **given)
        return func(*args, **given)


NAMES = ("input", "weight")
"""The first arguments of `torch.conv2d`."""


def channels_last(tensor: Tensor) -> Tensor:
    """The same images or weights (n, C, h, w) with the channels last in memory; others, such as a single image (C, h,
    w), as they are."""
    if tensor.ndim != 4 or is_batchedtensor(tensor):
        return tensor
    return tensor.to(memory_format=torch.channels_last)

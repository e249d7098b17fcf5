"""Convolutions of a block of clients as batched products, in the place of torch's grouped convolution, and the layers
between them in the order in which the products lie in memory.

Under vmap, the convolution of clients with weights of their own becomes one convolution with a group for each client,
and libraries for GPUs start kernels of their own for every group. As a product, the places of each weight in the images
become columns (I k l, B L), by views of the images and one copy, and every client multiplies its weights (O, I k l)
with its columns: one batched product for all clients. The gradients in the weights and in the images are batched
products too, by plain autograd, and the columns are added up to images by as many kernels as an image has sides,
without atomic operations: so they repeat to the bit.

A product has the channels of a client's images before the examples. Under vmap, max pooling would first copy them to
the order that it wants; but it treats each channel of each image by itself, so that the two axes are exchanged instead.
The gradient in the weights of a linear layer comes out of torch's product transposed, and is copied once more before
the gradients are joined; here it is a product in the order of the weights.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._C._functorch import is_batchedtensor  # pyright: ignore[reportMissingImports]
from torch.nn import functional as F

from .contract import Run
from .cuda_graph import Graph
from .replacements import Replacements

Pair = tuple[int, int]


@dataclass(frozen=True)
class Products(Graph):
    """The convolutions of a block are batched products, and its steps are replayed from a CUDA graph."""

    name: ClassVar[str] = "products"
    needs_proof: ClassVar[bool] = True

    def is_promising(self, run: Run) -> bool:
        """Where the model has weights (O, I, k, l)."""
        return super().is_promising(run) and any(len(shape) == 4 for shape in run.layout.shapes)

    def around_losses(self) -> AbstractContextManager[Any]:
        own = {torch.conv2d: of_a_block, F.linear: linear_of_a_block}
        return Replacements({**own, F.max_pool2d: pooled, torch.max_pool2d: pooled})


def of_a_block(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor | None:
    """`torch.conv2d` of clients with weights of their own; None leaves all others to torch."""
    if input.ndim != 4 or not is_batchedtensor(weight):
        return None
    return as_product(input, weight, bias, stride, padding, dilation, groups)


def linear_of_a_block(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    """`F.linear` of clients with weights of their own, for inputs (B, I); None leaves all others to torch."""
    if input.ndim != 2 or not is_batchedtensor(weight):
        return None
    y = (weight @ input.T).T
    return y if bias is None else y + bias


def pooled(
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Tensor | None:
    """`F.max_pool2d` of clients' images that have their channels before the examples in memory, to the same bits; None
    leaves all others to torch."""
    if input.ndim != 4 or return_indices or not is_batchedtensor(input) or input.is_contiguous():
        return None
    images = input.transpose(0, 1)
    if not images.is_contiguous():
        return None
    return torch.max_pool2d(images, kernel_size, stride or kernel_size, padding, dilation, ceil_mode).transpose(0, 1)


def as_product(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    """The convolution of one client as a product; under vmap, of all clients of a block in one batched product. Its
    arguments are those of `torch.conv2d`. Returns images (B, O, h, w)."""
    steps, apart = pair(stride), pair(dilation)
    spans: Pair = tuple(apart[i] * (weight.shape[2 + i] - 1) for i in range(2))  # pyright: ignore[reportAssignmentType]
    images = padded(input, padding, spans)
    places = images.unfold(2, spans[0] + 1, steps[0]).unfold(3, spans[1] + 1, steps[1])[..., :: apart[0], :: apart[1]]
    examples, channels, height, width, *_ = places.shape
    columns = places.permute(1, 4, 5, 0, 2, 3).reshape(groups, weight[0].numel(), examples * height * width)
    outputs = len(weight)
    assert channels == groups * weight.shape[1]
    y = (weight.reshape(groups, outputs // groups, -1) @ columns).view(outputs, examples, height, width)
    if bias is not None:
        y = y + bias.view(-1, 1, 1, 1)
    return y.transpose(0, 1)


def padded(images: Tensor, padding: Any, spans: Pair) -> Tensor:
    """Images with zeros around them. padding: a number, one for each axis, "valid" or "same". spans: the distance from
    the first to the last weight along each axis."""
    if padding == "same":
        sides = [side for span in reversed(spans) for side in (span // 2, span - span // 2)]
    else:
        sides = [side for side in reversed(pair(0 if padding == "valid" else padding)) for _ in range(2)]
    return F.pad(images, sides) if any(sides) else images


def pair(value: Any) -> Pair:
    """A number for both axes, or a number for each axis."""
    if isinstance(value, int):
        return value, value
    values = tuple(int(each) for each in value)
    return values[0], values[-1]

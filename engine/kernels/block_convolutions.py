"""Convolutions of a block of clients as one batched product, in the place of torch's grouped convolution.

Under vmap, the convolution of clients with weights of their own becomes one convolution with a group for each client.
Libraries for GPUs are slow at that for some shapes and fast for others. As a product, the inputs are unfolded to
columns (I k l, B L), which every client multiplies with its weights (O, I k l): more memory, and a kernel that is
always well tuned. Which is quicker is measured for each convolution of a network (`planning/autotune.py`).

A plan that uses products names them in its kernels, as in "graph+products:0,2": the first and the third convolution in
the order in which a loss calls them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import is_batchedtensor  # pyright: ignore[reportMissingImports]
from torch.nn import functional as F

from .replacements import Replacements

SEPARATOR = "+products:"


class Arguments(NamedTuple):
    """The arguments of `torch.conv2d`, by name."""

    input: Tensor
    weight: Tensor
    bias: Tensor | None = None
    stride: Any = 1
    padding: Any = 0
    dilation: Any = 1
    groups: int = 1

    @property
    def fits(self) -> bool:
        """Whether it can be a product: images (B, I, h, w), weights of the client's own, no groups, padding by
        numbers."""
        plain = self.groups == 1 and not isinstance(self.padding, str)
        return plain and self.input.ndim == self.weight.ndim == 4 and is_batchedtensor(self.weight)


def as_product(given: Arguments) -> Tensor:
    """The convolution of one client as a product; under vmap, of all clients of a block in one batched product."""
    x, weight = given.input, given.weight
    side = tuple(weight.shape[2:])
    stride, padding, dilation = (pair(value) for value in (given.stride, given.padding, given.dilation))
    height, width = (
        (x.shape[2 + i] + 2 * padding[i] - dilation[i] * (side[i] - 1) - 1) // stride[i] + 1 for i in range(2)
    )
    columns = F.unfold(x, side, dilation, padding, stride)  # (B, I k l, L)
    y = weight.flatten(1) @ columns.transpose(0, 1).reshape(columns.shape[1], -1)  # (O, B L)
    y = y.view(len(weight), len(x), height, width)
    if given.bias is not None:
        y = y + given.bias.view(-1, 1, 1, 1)
    return y.transpose(0, 1)


def pair(value: Any) -> tuple[int, int]:
    """A number for both sides, or a number for each side."""
    if isinstance(value, int):
        return value, value
    values = tuple(int(each) for each in value)
    return (values[0], values[-1])


def convolutions_by(convolved: Callable[[int, Arguments], Tensor | None]) -> Replacements:
    """A context in which every convolution of a client's own weights is computed by a function. convolved: (its number
    among them, its arguments) -> the result, or None for torch's."""
    numbers = count()

    def conv2d(*args: Any, **kwargs: Any) -> Tensor | None:
        given = Arguments(*args, **kwargs)
        return convolved(next(numbers), given) if given.fits else None

    return Replacements({torch.conv2d: conv2d})


def products(numbers: Sequence[int]) -> Replacements:
    """A context in which the convolutions with these numbers are products."""
    return convolutions_by(lambda number, given: as_product(given) if number in numbers else None)


def with_products(kernels: str, numbers: Sequence[int]) -> str:
    """The name of kernels that compute the convolutions with these numbers as products."""
    return f"{kernels}{SEPARATOR}{','.join(map(str, numbers))}" if numbers else kernels


def entry_of(kernels: str) -> str | dict[str, Any]:
    """The entry of the table KERNELS with its arguments for the name in a plan."""
    name, separator, numbers = kernels.partition(SEPARATOR)
    return {"name": name, "products": numbers.split(",")} if separator else name

"""Loss and gradient of a chain of layers in one call of native.

A workload may say that its losses are the cross-entropy of a chain of modules (`Workload.chained`). Where each of them
is a convolution, a linear layer, ReLU, 2 x 2 max pooling or flattening, `chain.cpp` does all of a client's forward and
backward pass before it turns to the next client: at these sizes torch spends more on calls, fresh memory and copies
than on arithmetic. Weights of a client and whatever comes of them stay in the processor's caches.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ..algorithms.tree import Layout
from ..workloads.base import Batch, Chained, Workload
from .kernels import SIDES, at, one
from .native import library

CONV, LINEAR = range(2)


class Layer(NamedTuple):
    """`Layer` of chain.cpp."""

    kind: int
    weight: int  # where it begins on the flat vector
    bias: int  # the same; -1 for none
    inputs: int
    outputs: int
    height: int = 0
    width: int = 0
    padding: int = 0
    side: int = 0
    relu: int = 0
    pool: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Of an example's output."""
        if self.kind == LINEAR:
            return (self.outputs,)
        grown = 2 * self.padding - self.side + 1
        height, width = self.height + grown, self.width + grown
        return (self.outputs, height // 2, width // 2) if self.pool else (self.outputs, height, width)


class Unfit(Exception):
    """The modules are no chain that chain.cpp has."""


class Chain:
    def __init__(self, layers: list[Layer], chained: Chained) -> None:
        self.layers = np.array(layers, dtype=np.int64)
        self.chained = chained

    def gradient(self, points: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """(gradients (c, P), losses (c,)) at points (c, P), for columns (c, B, …); all without c for one client."""
        points, columns = points.contiguous(), self._columns(batch, points.dtype)
        gradients, losses = torch.empty_like(points), points.new_empty(points.shape[:-1])
        self._call("chain_gradient", (points, *columns, gradients, losses), columns[1], points.shape[-1])
        return gradients, losses

    def descend(
        self, y: Tensor, batches: Batch, lr: float, shift: Tensor | None, total: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """(y (P,), losses (K,)) after a step y <- y - lr (gradient + shift) on each of a client's batches (K, B, …);
        total (P,), if there is one, is written to: the gradients are added to it."""
        columns, losses = self._columns(batches, y.dtype), y.new_empty(len(batches["label"]))
        y, shift = y.clone(), None if shift is None else shift.contiguous()
        self._call("chain_descend", (y, shift, total, *columns, losses), columns[1], len(y), ctypes.c_float(lr))
        return y, losses

    def _columns(self, batch: Batch, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor | None]:
        """(inputs, labels, each example's share of the loss), as chain.cpp reads them."""
        label, share = batch["label"].contiguous(), batch.get("weight")
        x = self.chained.inputs({"input": batch["input"].flatten(0, label.ndim - 1)}, dtype).contiguous()
        return x, label, None if share is None else share.to(dtype).contiguous()

    def _call(self, name: str, tensors: tuple[Tensor | None, ...], label: Tensor, parameters: int, *more: Any) -> None:
        """label: (n, B), or (B,), one of the tensors; parameters: P."""
        layers = ctypes.c_void_p(self.layers.ctypes.data)
        sizes = (len(self.layers), label.shape[:-1].numel(), label.shape[-1], parameters)
        if getattr(library(), name)(*map(at, tensors), layers, *map(ctypes.c_int64, sizes), *more):
            raise IndexError(f"a label is out of bounds: classes 0 … {self.layers[-1][4] - 1}, got {label.tolist()}")


def chain_of(workload: Workload, layout: Layout) -> Chain | None:
    """None where the workload's loss is not of such a chain on these parameters."""
    chained = workload.chained
    if chained is None or workload.buffers:
        return None
    try:
        layers = list(fused(modules(chained.network, ""), chained.shape, layout))
    except Unfit:
        return None
    used = sum(layer.outputs * (layer.inputs * max(layer.side, 1) ** 2 + (layer.bias >= 0)) for layer in layers)
    ends = layers and layers[-1].kind == LINEAR and not layers[-1].relu
    return Chain(layers, chained) if ends and used == sum(layout.sizes) else None


def modules(network: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    for name, part in network.named_children():
        if type(part) is nn.Sequential:
            yield from modules(part, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}.", part


def fused(parts: Iterator[tuple[str, nn.Module]], shape: tuple[int, ...], layout: Layout) -> Iterator[Layer]:
    """Layers with what follows them; shape: of an example."""
    last: Layer | None = None
    for prefix, part in parts:
        if type(part) is nn.Flatten and part.start_dim == 1 and part.end_dim == -1:
            shape = (prod(shape),)
        elif last is not None and type(part) is nn.ReLU:
            last = last._replace(relu=1)
        elif last is not None and last.kind == CONV and halving(part) and shape == last.shape and not last.pool:
            last = last._replace(pool=1)
            shape = last.shape
        else:
            if last is not None:
                yield last
            last = layer(prefix, part, shape, layout)
            shape = last.shape
    if last is not None:
        yield last


def halving(part: nn.Module) -> bool:
    if type(part) is not nn.MaxPool2d or part.return_indices or part.ceil_mode:
        return False
    return (one(part.kernel_size), one(part.stride), one(part.padding), one(part.dilation)) == (2, 2, 0, 1)


def layer(prefix: str, part: nn.Module, shape: tuple[int, ...], layout: Layout) -> Layer:
    bias = layout.spans[f"{prefix}bias"][0] if f"{prefix}bias" in layout.spans else -1
    if type(part) is nn.Linear and shape == (part.in_features,):
        return Layer(LINEAR, layout.spans[f"{prefix}weight"][0], bias, part.in_features, part.out_features)
    if type(part) is not nn.Conv2d or len(shape) != 3 or shape[0] != part.in_channels or part.padding_mode != "zeros":
        raise Unfit
    side, padding = one(part.kernel_size), one(part.padding)
    plain = one(part.stride) == one(part.dilation) == part.groups == 1
    if not plain or side not in SIDES or not isinstance(padding, int) or not 0 <= padding < side:
        raise Unfit
    if min(shape[1:]) + 2 * padding < side:
        raise Unfit
    start = layout.spans[f"{prefix}weight"][0]
    return Layer(CONV, start, bias, part.in_channels, part.out_channels, *shape[1:], padding, side)

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

from ...algorithms.tree import Layout
from ...workloads.base import Batch, Chained, Classification, Workload
from .library import library
from .operators import NO_CLASS, SIDES, check_status, pointer, scalar_of

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
    def spans(self) -> list[tuple[int, int]]:
        """(begin, size) on the flat vector of the weights, and of the biases where there are any."""
        weight = (self.weight, self.outputs * self.inputs * max(self.side, 1) ** 2)
        return [weight] if self.bias < 0 else [weight, (self.bias, self.outputs)]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of an example's output."""
        if self.kind == LINEAR:
            return (self.outputs,)
        grown = 2 * self.padding - self.side + 1
        height, width = self.height + grown, self.width + grown
        return (self.outputs, height // 2, width // 2) if self.pool else (self.outputs, height, width)


class NotAChain(Exception):
    """The workload's loss is not one that chain.cpp has; says why."""


class Chain:
    def __init__(self, layers: list[Layer], chained: Chained, parameters: int) -> None:
        self.layers = np.array(layers, dtype=np.int64)
        self.chained, self.parameters = chained, parameters

    def gradient(self, points: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """(gradients (c, P), losses (c,)) at points (c, P), for columns (c, B, …); all without c for one client.

        Raises IndexError for a label that is no class, RuntimeError for columns of another shape or type than the
        network takes, MemoryError."""
        points, columns = points.contiguous(), self._columns(batch, points)
        gradients, losses = torch.empty_like(points), points.new_empty(points.shape[:-1])
        self._call("chain_gradient", (points, *columns, gradients, losses), columns[1], points.shape[-1])
        return gradients, self._of_any(losses, columns)

    def descend(
        self, y: Tensor, batches: Batch, lr: float, shift: Tensor | None, total: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """(y (P,), losses (K,)) after a step y <- y - lr (gradient + shift) on each of a client's batches (K, B, …);
        total (P,), if there is one, is written to: the gradients are added to it. Errors as of `gradient`."""
        columns, losses = (
            self._columns(batches, y.expand(len(batches["label"]), -1)),
            y.new_empty(len(batches["label"])),
        )
        for name, other in (("the constant", shift), ("the sum of gradients", total)):
            if other is not None and (other.shape != y.shape or other.dtype != y.dtype):
                raise RuntimeError(f"{name} must be {y.dtype} {list(y.shape)}, got {other.dtype} {list(other.shape)}")
        if total is not None and not total.is_contiguous():
            raise RuntimeError("the sum of gradients must be contiguous: it is written to")
        y, shift = y.clone(memory_format=torch.contiguous_format), None if shift is None else shift.contiguous()
        self._call("chain_descend", (y, shift, total, *columns, losses), columns[1], len(y), ctypes.c_float(lr))
        return y, self._of_any(losses, columns)

    def _columns(self, batch: Batch, points: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """(inputs, labels, each example's share of the loss), as chain.cpp reads them: it trusts their sizes."""
        label, share = batch["label"], batch.get("weight")
        if points.dtype != torch.float32 or points.device.type != "cpu" or points.shape[-1] != self.parameters:
            wanted = f"float32 (…, {self.parameters}) on the processor"
            raise RuntimeError(f"weights must be {wanted}, got {points.dtype} {list(points.shape)} on {points.device}")
        if label.dtype != torch.int64:
            if label.is_floating_point() or label.is_complex():
                raise RuntimeError(f"labels must be integers, got {label.dtype}")
            label = label.long()
        if label.shape[:-1] != points.shape[:-1] or not label.ndim:
            raise RuntimeError(f"labels must be {[*points.shape[:-1], 'B']}, got {list(label.shape)}")
        given = batch["input"]
        if given.shape[: label.ndim] != label.shape:
            raise RuntimeError(f"inputs must be {[*label.shape, '…']} as their labels are, got {list(given.shape)}")
        x = self.chained.inputs({"input": given.flatten(0, label.ndim - 1)}, points.dtype).contiguous()
        if x.shape != (label.numel(), *self.chained.shape) or x.dtype != points.dtype or x.device != points.device:
            wanted = f"{points.dtype} {[label.numel(), *self.chained.shape]}"
            raise RuntimeError(f"inputs must be {wanted} for this network, got {x.dtype} {list(x.shape)}")
        if share is not None:
            if share.shape != label.shape:
                raise RuntimeError(f"weights of examples must be {list(label.shape)}, got {list(share.shape)}")
            share = share.to(points.dtype).contiguous()
        return x, label.contiguous(), share

    def _of_any(self, losses: Tensor, columns: tuple[Tensor, Tensor, Tensor | None]) -> Tensor:
        """The mean over no example is no number."""
        _, label, share = columns
        return losses if label.shape[-1] or share is not None else losses.fill_(torch.nan)

    def _call(self, name: str, tensors: tuple[Tensor | None, ...], label: Tensor, parameters: int, *more: Any) -> None:
        """label: (n, B), or (B,), one of the tensors; parameters: P."""
        layers = ctypes.c_void_p(self.layers.ctypes.data)
        sizes = (len(self.layers), label.shape[:-1].numel(), label.shape[-1], parameters)
        status = getattr(library(), name)(*map(pointer, tensors), layers, *map(ctypes.c_int64, sizes), *more)
        check_status(status)
        if status == NO_CLASS:
            raise IndexError(f"a label is out of bounds: classes 0 … {self.layers[-1][4] - 1}, got {label.tolist()}")


def chain_or_none(workload: Workload, layout: Layout) -> Chain | None:
    """None where the workload's loss is not of such a chain on these parameters."""
    try:
        return chain_from(workload, layout)
    except NotAChain:
        return None


def chain_from(workload: Workload, layout: Layout) -> Chain:
    """The chain; Unfit with the reason where the workload's loss is none on these parameters."""
    chained = workload.chained
    if chained is None:
        own = workload.overridden if isinstance(workload, Classification) else []
        whose = f"its own {', '.join(own)}" if own else "a loss that is not said to be one"
        raise NotAChain(f"the workload {type(workload).__name__} has {whose}")
    if workload.buffers:
        raise NotAChain("the model has running statistics")
    refuse_hooks(None, "")
    layers = list(fuse_layers(visited_modules(chained.network, ""), chained.shape, layout))
    if not layers or layers[-1].kind != LINEAR or layers[-1].relu:
        raise NotAChain("the last layer must be a linear one, and nothing must follow it")
    spans = [span for each in layers for span in each.spans]
    if sorted(spans) != sorted((begin, size) for begin, size, _ in layout.spans.values()):
        raise NotAChain("some of the model's parameters are in none of its layers, or in several")
    return Chain(layers, chained, sum(layout.sizes))


HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)
"""Where a module keeps functions that torch calls beside its `forward`; those of all modules are called alike."""


def refuse_hooks(part: nn.Module | None, name: str) -> None:
    """Raise Unfit where something else than its class's `forward` runs as torch calls a module; None: any module."""
    if part is None:
        if any(getattr(nn.modules.module, f"_global{hooks}") for hooks in HOOKS):
            raise NotAChain("hooks are registered for all modules")
        return
    if any(getattr(part, hooks) for hooks in HOOKS):
        raise NotAChain(f"{name or 'the network'} has hooks")
    if own := {"forward", "__call__", "_call_impl", "_compiled_call_impl"} & {k for k, v in vars(part).items() if v}:
        raise NotAChain(f"{name or 'the network'} has a {min(own)} of its own")


def visited_modules(network: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """(prefix of its parameters' names, module) as often as torch visits it, in its order."""
    if type(network) is not nn.Sequential:
        what = f"{prefix[:-1]} is" if prefix else "the network is"
        raise NotAChain(f"{what} a {type(network).__name__}, not nn.Sequential itself")
    refuse_hooks(network, prefix[:-1])
    for name, part in network._modules.items():  # not `named_children`, which names what is used twice once
        if part is None:
            raise NotAChain(f"{prefix}{name} is no module")
        if isinstance(part, nn.Sequential):
            yield from visited_modules(part, f"{prefix}{name}.")
        else:
            refuse_hooks(part, f"{prefix}{name}")
            yield f"{prefix}{name}.", part


def fuse_layers(parts: Iterator[tuple[str, nn.Module]], shape: tuple[int, ...], layout: Layout) -> Iterator[Layer]:
    """Layers with what follows them; shape: of an example."""
    last: Layer | None = None
    for prefix, part in parts:
        if type(part) is nn.Flatten and part.start_dim == 1 and part.end_dim == -1:
            shape = (prod(shape),)
        elif last is not None and type(part) is nn.ReLU:
            last = last._replace(relu=1)
        elif last is not None and last.kind == CONV and is_2x2_pooling(part) and shape == last.shape and not last.pool:
            last = last._replace(pool=1)
            shape = last.shape
        else:
            if last is not None:
                yield last
            last = make_layer(prefix, part, shape, layout)
            shape = last.shape
    if last is not None:
        yield last


def is_2x2_pooling(part: nn.Module) -> bool:
    if type(part) is not nn.MaxPool2d or part.return_indices or part.ceil_mode:
        return False
    return (scalar_of(part.kernel_size), scalar_of(part.stride), scalar_of(part.padding), scalar_of(part.dilation)) == (
        2,
        2,
        0,
        1,
    )


def make_layer(prefix: str, part: nn.Module, shape: tuple[int, ...], layout: Layout) -> Layer:
    name = f"{prefix[:-1]} ({type(part).__name__})"
    if type(part) is nn.Linear:
        if shape != (part.in_features,):
            raise NotAChain(f"{name} takes {part.in_features} inputs, got {list(shape)}")
        begins = parameter_offsets(prefix, part, (part.out_features, part.in_features), layout)
        return Layer(LINEAR, *begins, part.in_features, part.out_features)
    if type(part) is nn.Conv2d:
        if len(shape) != 3 or shape[0] != part.in_channels or part.padding_mode != "zeros":
            raise NotAChain(f"{name} is not one of {list(shape)} that is padded by zeros")
        side, padding = scalar_of(part.kernel_size), scalar_of(part.padding)
        plain = scalar_of(part.stride) == scalar_of(part.dilation) == part.groups == 1
        if not plain or side not in SIDES or not isinstance(padding, int) or not 0 <= padding < side:
            raise NotAChain(f"{name} is not a square one, of stride 1, in one group, of a side of {SIDES}")
        if min(shape[1:]) + 2 * padding < side:
            raise NotAChain(f"{name} is larger than its input {list(shape)}")
        begins = parameter_offsets(prefix, part, (part.out_channels, part.in_channels, side, side), layout)
        return Layer(CONV, *begins, part.in_channels, part.out_channels, *shape[1:], padding, side)
    raise NotAChain(f"{name} is none of the layers")


def parameter_offsets(
    prefix: str, part: nn.Linear | nn.Conv2d, shape: tuple[int, ...], layout: Layout
) -> tuple[int, int]:
    """Where the weights and the biases begin on the flat vector, -1 for no biases; shape: of the weights. The module's
    own tensors are those of its last call, and are not looked at."""
    begins = []
    for leaf, wanted in (("weight", shape), ("bias", None if part.bias is None else shape[:1])):
        begin, _, found = layout.spans.get(f"{prefix}{leaf}", (-1, 0, None))
        if found != wanted:  # a tensor of two modules has the name of the first one alone
            raise NotAChain(f"{prefix}{leaf} is shared with another module, or of another shape than the module says")
        begins.append(begin)
    return begins[0], begins[1]

"""Loss and gradient of a chain of layers in one call of compiled code.

A workload may declare that its loss is the cross-entropy of a chain of modules (`Workload.chained`). If each of them is
a convolution, a linear layer, ReLU, 2 x 2 max pooling or flattening, `chain.h` computes the complete forward and
backward pass of one client before it starts with the next. For small networks torch spends more time on calls, new
memory and copies than on arithmetic. Here the weights and intermediate results of a client stay in the processor's
caches.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from math import prod
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ...algorithms.tree import Layout
from ...workloads.classification import Classification
from ...workloads.workload import Batch, Chained, Workload
from .contract import Run
from .library import NO_CLASS, NoKernels, check_status, library, pointer
from .operators import SIDES, Native
from .replacements import scalar_of

CONV, LINEAR = range(2)


class Layer(NamedTuple):
    """A layer with the ReLU and pooling that follow it: the struct `Layer` of chain.h, in the same order."""

    kind: int
    weight: int  # where the weights begin on the flat vector
    bias: int  # where the biases begin; -1 for none
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
        """(begin, size) on the flat vector of the weights, then of the biases if there are any."""
        weight = (self.weight, self.outputs * self.inputs * max(self.side, 1) ** 2)
        return [weight] if self.bias < 0 else [weight, (self.bias, self.outputs)]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the output for one example."""
        if self.kind == LINEAR:
            return (self.outputs,)
        grown = 2 * self.padding - self.side + 1
        height, width = self.height + grown, self.width + grown
        return (self.outputs, height // 2, width // 2) if self.pool else (self.outputs, height, width)


class NotAChain(Exception):
    """chain.h cannot compute the workload's loss. The message says why."""


class Chain:
    """The loss of a workload as chain.h computes it, a `LossInOneCall`. `parameters`: the length P of the flat
    vector."""

    def __init__(self, layers: list[Layer], chained: Chained, parameters: int) -> None:
        self.layers = np.array(layers, dtype=np.int64)
        self.chained, self.parameters = chained, parameters

    def gradient(self, points: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        points, (label, share) = points.contiguous(), self._labels(batch, points)
        x = self._inputs(batch, label, points)
        gradients, losses = torch.empty_like(points), points.new_empty(points.shape[:-1])
        self._call("chain_gradient", (points, x, label, share, gradients, losses), label)
        return gradients, self._nan_if_empty(losses, label, share)

    def outputs(self, points: Tensor, batch: Batch) -> Tensor:
        points, (label, _) = points.contiguous(), self._labels(batch, points)
        x = self._inputs(batch, label, points)
        found = points.new_empty(*label.shape, int(self.layers[-1][4]))
        layers = ctypes.c_void_p(self.layers.ctypes.data)
        sizes = (len(self.layers), label.shape[:-1].numel(), label.shape[-1], self.parameters)
        check_status(library().chain_outputs(*map(pointer, (points, x, found)), layers, *map(ctypes.c_int64, sizes)))
        return found

    def descend(
        self,
        y: Tensor,
        batches: Batch,
        lr: float,
        shift: Tensor | None = None,
        total: Tensor | None = None,
        pull: tuple[float, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        steps = len(batches["label"])
        (label, share), losses = self._labels(batches, y.expand(steps, -1)), y.new_empty(steps)
        x = self._inputs(batches, label, y)
        lam, centre = pull or (0.0, None)
        for name, other in (("the constant", shift), ("the centre", centre), ("the sum of gradients", total)):
            if other is not None and (other.shape != y.shape or other.dtype != y.dtype):
                raise RuntimeError(f"{name} must be {y.dtype} {list(y.shape)}, got {other.dtype} {list(other.shape)}")
        if total is not None and not total.is_contiguous():
            raise RuntimeError("the sum of gradients must be contiguous: it is written to")
        y = y.clone(memory_format=torch.contiguous_format)
        shift, centre = (None if each is None else each.contiguous() for each in (shift, centre))
        rates = ctypes.c_float(lr), ctypes.c_float(lam)
        self._call("chain_descend", (y, shift, centre, total, x, label, share, losses), label, *rates)
        return y, self._nan_if_empty(losses, label, share)

    # All sizes and types are checked here, since chain.h does not check them.

    def _labels(self, batch: Batch, points: Tensor) -> tuple[Tensor, Tensor | None]:
        """(labels, each example's share of the loss) as chain.h reads them."""
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
        if share is not None:
            if share.shape != label.shape:
                raise RuntimeError(f"weights of examples must be {list(label.shape)}, got {list(share.shape)}")
            share = share.to(points.dtype).contiguous()
        return label.contiguous(), share

    def _inputs(self, batch: Batch, label: Tensor, points: Tensor) -> Tensor:
        """The inputs (N, *shape) of all N examples, as chain.h reads them. label: of the examples."""
        if batch["input"].shape[: label.ndim] != label.shape:
            shape = list(batch["input"].shape)
            raise RuntimeError(f"inputs must be {[*label.shape, '…']} as their labels are, got {shape}")
        given = batch["input"].flatten(0, label.ndim - 1)
        x = self.chained.inputs({"input": given}, points.dtype).contiguous()
        if x.shape != (len(given), *self.chained.shape) or x.dtype != points.dtype or x.device != points.device:
            wanted = f"{points.dtype} {[len(given), *self.chained.shape]}"
            raise RuntimeError(f"inputs must be {wanted} for this network, got {x.dtype} {list(x.shape)}")
        return x

    def _nan_if_empty(self, losses: Tensor, label: Tensor, share: Tensor | None) -> Tensor:
        """The losses; NaN if the batch has no example, as the mean over no example."""
        return losses if label.shape[-1] or share is not None else losses.fill_(torch.nan)

    def _call(self, name: str, tensors: tuple[Tensor | None, ...], label: Tensor, *more: Any) -> None:
        """Call a function of the library. `label`: (n, B) or (B,), one of the tensors."""
        layers = ctypes.c_void_p(self.layers.ctypes.data)
        sizes = (len(self.layers), label.shape[:-1].numel(), label.shape[-1], self.parameters)
        status = getattr(library(), name)(*map(pointer, tensors), layers, *map(ctypes.c_int64, sizes), *more)
        check_status(status)
        if status == NO_CLASS:
            raise IndexError(f"a label is out of bounds: classes 0 … {self.layers[-1][4] - 1}, got {label.tolist()}")


def chain_or_none(workload: Workload, layout: Layout) -> Chain | None:
    """`chain_from`, but None if chain.h cannot compute the workload's loss."""
    try:
        return chain_from(workload, layout)
    except NotAChain:
        return None


def chain_from(workload: Workload, layout: Layout) -> Chain:
    """The chain that computes the workload's loss for models of this layout. Raises NotAChain with the reason."""
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
"""Attributes in which a module keeps functions that torch calls in addition to `forward`. With "_global" before the
name, they hold the functions that torch calls for all modules."""


def refuse_hooks(part: nn.Module | None, name: str) -> None:
    """Raise NotAChain if calling a module runs anything but the `forward` of its class. None stands for all modules."""
    if part is None:
        if any(getattr(nn.modules.module, f"_global{hooks}") for hooks in HOOKS):
            raise NotAChain("hooks are registered for all modules")
        return
    if any(getattr(part, hooks) for hooks in HOOKS):
        raise NotAChain(f"{name or 'the network'} has hooks")
    if own := {"forward", "__call__", "_call_impl", "_compiled_call_impl"} & {k for k, v in vars(part).items() if v}:
        raise NotAChain(f"{name or 'the network'} has a {min(own)} of its own")


def visited_modules(network: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """(prefix of its parameters' names, module) for each call that torch makes, in torch's order."""
    if type(network) is not nn.Sequential:
        what = f"{prefix[:-1]} is" if prefix else "the network is"
        raise NotAChain(f"{what} a {type(network).__name__}, not nn.Sequential itself")
    refuse_hooks(network, prefix[:-1])
    for name, part in network._modules.items():  # `named_children` would yield a module that is used twice only once
        if part is None:
            raise NotAChain(f"{prefix}{name} is no module")
        if isinstance(part, nn.Sequential):
            yield from visited_modules(part, f"{prefix}{name}.")
        else:
            refuse_hooks(part, f"{prefix}{name}")
            yield f"{prefix}{name}.", part


def fuse_layers(parts: Iterator[tuple[str, nn.Module]], shape: tuple[int, ...], layout: Layout) -> Iterator[Layer]:
    """The layers, each with the ReLU and pooling that follow it. `shape`: of an example's input."""
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
    """Whether a module is max pooling of 2 x 2 with stride 2 and without padding."""
    if type(part) is not nn.MaxPool2d or part.return_indices or part.ceil_mode:
        return False
    settings = (part.kernel_size, part.stride, part.padding, part.dilation)
    return tuple(map(scalar_of, settings)) == (2, 2, 0, 1)


def make_layer(prefix: str, part: nn.Module, shape: tuple[int, ...], layout: Layout) -> Layer:
    """A linear or convolutional layer. `shape`: of an example's input. Raises NotAChain for any other module."""
    name = f"{prefix[:-1]} ({type(part).__name__})"
    if type(part) is nn.Linear:
        if shape != (part.in_features,):
            raise NotAChain(f"{name} takes {part.in_features} inputs, got {list(shape)}")
        begins = parameter_offsets(prefix, part, (part.out_features, part.in_features), layout)
        return Layer(LINEAR, *begins, part.in_features, part.out_features)
    if type(part) is nn.Conv2d:
        if len(shape) != 3 or shape[0] != part.in_channels or part.padding_mode != "zeros":
            raise NotAChain(f"{name} does not take inputs of {list(shape)}, or is not padded by zeros")
        side, padding = scalar_of(part.kernel_size), scalar_of(part.padding)
        plain = scalar_of(part.stride) == scalar_of(part.dilation) == part.groups == 1
        if not plain or side not in SIDES or not isinstance(padding, int) or not 0 <= padding < side:
            raise NotAChain(f"{name} is not square with a side in {SIDES}, stride 1 and one group")
        if min(shape[1:]) + 2 * padding < side:
            raise NotAChain(f"{name} is larger than its input {list(shape)}")
        begins = parameter_offsets(prefix, part, (part.out_channels, part.in_channels, side, side), layout)
        return Layer(CONV, *begins, part.in_channels, part.out_channels, *shape[1:], padding, side)
    raise NotAChain(f"{name} is not a kind of layer that the chain has")


def parameter_offsets(
    prefix: str, part: nn.Linear | nn.Conv2d, shape: tuple[int, ...], layout: Layout
) -> tuple[int, int]:
    """Where the weights and the biases begin on the flat vector; -1 for no biases.

    `shape`: of the weights. The tensors that the module itself holds are not used: they belong to its last call.
    """
    begins = []
    for leaf, wanted in (("weight", shape), ("bias", None if part.bias is None else shape[:1])):
        begin, _, found = layout.spans.get(f"{prefix}{leaf}", (-1, 0, None))
        if found != wanted:  # a tensor that two modules share has the name of the first one only
            raise NotAChain(
                f"{prefix}{leaf} is frozen or shared with another module, or has another shape than the module says"
            )
        begins.append(begin)
    return begins[0], begins[1]


class FusedChain(Native):
    """Loss and gradient of a whole network in one compiled call, and compiled operators for everything else."""

    name: ClassVar[str] = "chain"
    single_losses: ClassVar[bool] = False
    instead_of: ClassVar[tuple[str, ...]] = ("channels_last", "native")

    def why_not(self, run: Run) -> str:
        if why := super().why_not(run):
            return why
        try:
            if run.precision is not None:
                raise NotAChain(f"engine.precision={run.experiment.engine.precision}")
            chain_from(run.workload, run.layout)
        except NotAChain as error:
            return (
                "for cross-entropy of a chain of convolutions, ReLU, 2 x 2 max pooling and linear layers, with "
                f"precision=same, but {error}"
            )
        return ""

    def chain(self, workload: Workload, layout: Layout) -> Chain:
        try:
            return chain_from(workload, layout)
        except NotAChain as error:
            raise NoKernels(f"chain kernels cannot be used here: {error}") from error

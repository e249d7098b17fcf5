"""Frozen parameters of a narrower type than the rest of a network, which are cast up where a module reads them.

A network whose frozen parameters are in bfloat16 or float16 takes half of their memory. A module casts its own ones up
to the type of the trained parameters, so that the network computes what it does with their numbers in that type, and
no more than a layer is there in both types. What autograd keeps of linear layers for a gradient is the narrow weight,
which is cast up once more in the backward pass; other modules with frozen weights keep a copy until then.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

HALF = (torch.bfloat16, torch.float16)
"""The types of floats with 16 bits."""


class Narrow(nn.Module):
    """A module whose parameters may be of a narrower type than `wide`, the type in which it computes. Who reads them as
    attributes, also from outside, gets them in `wide`."""

    wide: torch.dtype

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        return widened(value, self.wide) if isinstance(value, Tensor) and name in self._parameters else value


class NarrowLinear(Narrow, nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return linear(x, as_held(self, "weight"), self.bias)


class NarrowEmbedding(Narrow, nn.Embedding):
    def forward(self, x: Tensor) -> Tensor:
        if self.max_norm is not None:
            return super().forward(x)
        return widened(F.embedding(x, as_held(self, "weight"), self.padding_idx), self.wide)


class NarrowTransposed(Narrow):
    """What GPT-2's Conv1D has beside its own class."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, as_held(self, "weight").T, self.bias)


def as_held(part: nn.Module, name: str) -> Any:
    """A parameter of a module in the type that it has; what parametrizations of torch compute for it, in theirs."""
    return part._parameters[name] if name in part._parameters else getattr(part, name)


def computes_in(part: nn.Module) -> torch.dtype:
    """The type in which a module with a weight computes."""
    return part.wide if isinstance(part, Narrow) else as_held(part, "weight").dtype


def is_linear(part: nn.Module) -> bool:
    """Whether a module is torch's linear layer, without an adapter."""
    return type(part) in (nn.Linear, NarrowLinear)


def widened(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in a type that has more digits or a larger range than its own; any other one as it is."""
    return value.to(dtype) if value.is_floating_point() and is_narrower(value.dtype, dtype) else value


def is_narrower(dtype: torch.dtype, than: torch.dtype) -> bool:
    """Whether all numbers of a type of floats are numbers of another one that has more."""
    return dtype != than and torch.promote_types(dtype, than) == than


def cast_up_in(network: nn.Module, wide: torch.dtype) -> list[Narrow]:
    """Have the modules of a network that have narrower parameters cast them up, and return these modules. Their `wide`
    is to be set before each call."""
    found: list[Narrow] = []
    for part in network.modules():
        if any(value is not None and is_narrower(value.dtype, wide) for value in part._parameters.values()):
            if not isinstance(part, Narrow):
                bases: tuple[Any, ...] = type(part), form_of(part)
                kind, form = bases
                narrow: Any = form if form.__bases__[-1] is kind else type(f"Narrow{kind.__name__}", bases, {})
                part.__class__ = narrow
            found.append(part)  # pyright: ignore[reportArgumentType] its class is one of Narrow now
    return found


def form_of(part: nn.Module) -> type[Narrow]:
    """What a module that becomes narrow has before the class of torch that it is or derives from."""
    if isinstance(part, nn.Linear):
        return NarrowLinear
    if isinstance(part, nn.Embedding):
        return NarrowEmbedding
    for kind in type(part).__mro__:
        if kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers."):
            bases: tuple[Any, ...] = NarrowTransposed, kind
            return type("NarrowConv1D", bases, {})
    return Narrow


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + b. A weight that is narrower than x has no gradient."""
    if not is_narrower(weight.dtype, x.dtype):
        return F.linear(x, weight, bias)
    found: Any = Widened.apply(x, weight)
    return found if bias is None else found + bias


class Widened(torch.autograd.Function):
    """x W^T, where W is cast up to the type of x, and again for the gradient of x. W has no gradient."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight.to(x.dtype))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, *of_outputs: Any) -> Any:
        (weight,) = ctx.saved_tensors
        (gradient,) = of_outputs
        return gradient @ weight.to(gradient.dtype), None

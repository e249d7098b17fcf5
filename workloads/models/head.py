"""The last layer of a language model and its loss, for some places of a text at a time.

Logits have a number for each token of the vocabulary, softmax and gradient as many again: for large vocabularies they
are most of the memory of a step. Here they are computed for a chunk of places, and once more for the gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..objectives import cross_entropy, wide
from .narrow import linear, widened

CHUNK_BYTES = 64 << 20
"""The largest size of the logits that are computed at once, unless a number of places is given."""
WITHOUT_HEAD: ContextVar[bool] = ContextVar("WITHOUT_HEAD", default=False)
"""Whether a language model gives what its last layer reads, (B, T, width), in the place of logits."""


@contextmanager
def without_head() -> Iterator[None]:
    """A context in which `WITHOUT_HEAD` holds."""
    token = WITHOUT_HEAD.set(True)
    try:
        yield
    finally:
        WITHOUT_HEAD.reset(token)


class Head(NamedTuple):
    """A last layer: logits = W h + b, and, with a cap, cap tanh(logits / cap). `weight`: (V, width); a frozen one may
    be of a narrower type."""

    weight: Tensor
    bias: Tensor | None = None
    cap: float | None = None

    def logits(self, hidden: Tensor) -> Tensor:
        found = linear(hidden, self.weight, self.bias)
        return found if self.cap is None else self.cap * torch.tanh(found / self.cap)

    def losses(self, hidden: Tensor, label: Tensor, places: int) -> Tensor:
        """(B, T): the loss at each place. hidden: (B, T, width). label: (B, T) int64. places: of a chunk."""
        return InChunks.apply(hidden, label, self.weight, self.bias, self.cap, places)  # pyright: ignore[reportReturnType]

    def hits(self, hidden: Tensor, label: Tensor, places: int) -> Tensor:
        """(B, T) bool: whether the label has the largest logit, the first of equal ones. Without a gradient."""
        pairs = zip(hidden.split(places, 1), label.split(places, 1), strict=True)
        return torch.cat([self.logits(h).argmax(-1) == tokens for h, tokens in pairs], 1)


def places_at_once(asked: int | None, rows: int, vocabulary: int) -> int:
    """How many places of each of so many rows have their logits at once. asked: the setting, None for `CHUNK_BYTES`."""
    return max(1, CHUNK_BYTES // (4 * rows * vocabulary)) if asked is None else asked


def losses_of(head: Head, hidden: Tensor, label: Tensor) -> Tensor:
    """(B, t): the losses of a chunk."""
    return cross_entropy(head.logits(hidden).flatten(0, 1), label.flatten()).view(label.shape)


class InChunks(torch.autograd.Function):
    """`Head.losses`. It has a first derivative alone."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        hidden: Tensor, label: Tensor, weight: Tensor, bias: Tensor | None, cap: float | None, places: int
    ) -> Tensor:
        head = Head(widened(weight, hidden.dtype), bias, cap)
        pairs = zip(hidden.split(places, 1), label.split(places, 1), strict=True)
        return torch.cat([losses_of(head, *pair) for pair in pairs], 1)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        hidden, label, weight, bias, ctx.cap, ctx.places = inputs
        ctx.has_bias = bias is not None
        ctx.save_for_backward(hidden, label, weight, *([bias] if ctx.has_bias else []))

    @staticmethod
    def backward(ctx: Any, *of_outputs: Any) -> Any:
        hidden, label, weight, *rest = ctx.saved_tensors
        wide_weight = widened(weight, hidden.dtype)  # once for all chunks
        head = Head(wide_weight, rest[0] if ctx.has_bias else None, ctx.cap)
        to_hidden, to_weight, to_bias = [], None, None
        needs_weight, needs_bias = ctx.needs_input_grad[2], ctx.has_bias and ctx.needs_input_grad[3]
        parts = zip(*(x.split(ctx.places, 1) for x in (hidden, label, of_outputs[0])), strict=True)
        for h, tokens, gradient in parts:
            of_logits = gradient_of_logits(head, h, tokens, gradient)
            to_hidden.append(of_logits @ wide_weight)
            if needs_weight:
                part = of_logits.flatten(0, 1).transpose(0, 1) @ h.flatten(0, 1)
                to_weight = part if to_weight is None else to_weight + part
            if needs_bias:
                part = of_logits.sum((0, 1))
                to_bias = part if to_bias is None else to_bias + part
        return torch.cat(to_hidden, 1), None, to_weight, to_bias, None, None


def gradient_of_logits(head: Head, hidden: Tensor, label: Tensor, gradient: Tensor) -> Tensor:
    """(B, t, V), of what W h + b is, from that of the losses (B, t): (softmax - 1 at the label), through the cap."""
    logits = wide(head.logits(hidden))
    found = torch.softmax(logits, -1)
    found = found.scatter_add(-1, label.unsqueeze(-1), -torch.ones_like(found[..., :1]))
    found = found * gradient.to(found.dtype).unsqueeze(-1)
    if head.cap is not None:
        found = found * (1 - (logits / head.cap).square())
    return found.to(hidden.dtype)

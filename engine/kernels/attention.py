"""Attention of short sequences in one compiled call for all heads of all clients of a block.

Torch computes attention that is written as operations by products, copies and passes over all weights (T, T) of all
heads, which are larger than the processor's nearer caches; under vmap it copies queries, keys and values, too. The
compiled kernel (`csrc/attention.h`) computes one head from its first product to its last one, and omits products of
places that a mask hides. It reads and writes the numbers of a head where the layers before and behind have them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...workloads.models.attention import ONE_CALL
from ...workloads.models.derivatives import first_derivatives_only
from .contract import Run
from .library import call
from .operators import Native, native_operators
from .replacements import supported

MOST_LANES = 16
"""The most numbers of a vector (`vectors.h`), to which rows of weights are rounded up."""


class Attention(torch.autograd.Function):
    """(y (N, T, H, d), the weights for the backward pass) for q, k, v (N, T, H, d), and unseen (T, T) or (N, T, T)."""

    generate_vmap_rule = False

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, unseen: Tensor) -> tuple[Tensor, Tensor]:
        sequences, places, heads, _ = q.shape
        y = q.new_empty(q.shape)
        weights = q.new_empty(sequences, heads, places, -(-places // MOST_LANES) * MOST_LANES)
        call("attention", (q, k, v, unseen, y, weights), *sizes_of(q, k, v, unseen))
        return y, weights

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs, output[1])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, v, unseen, weights = ctx.saved_tensors
        found = [q.new_empty(q.shape) if wanted else None for wanted in ctx.needs_input_grad[:3]]
        given = (q, k, v, unseen, grads[0].contiguous(), weights, *found)
        call("attention_back", given, *sizes_of(q, k, v, unseen))
        return *found, None

    @staticmethod
    def vmap(info: Any, dims: Any, *given: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        *projected, unseen = (
            each if dim is None else each.movedim(dim, 0) for each, dim in zip(given, dims, strict=True)
        )
        clients = info.batch_size
        projected = [
            (each if dim is not None else each.expand(clients, *each.shape)).flatten(0, 1)
            for each, dim in zip(projected, dims, strict=False)
        ]
        sequences = len(projected[0]) // clients
        if dims[3] is not None:  # clients have masks of their own
            unseen = unseen if unseen.ndim == 4 else unseen.unsqueeze(1).expand(-1, sequences, -1, -1)
            unseen = unseen.flatten(0, 1)
        elif unseen.ndim == 3:
            unseen = unseen.expand(clients, *unseen.shape).flatten(0, 1)
        found = Attention.apply(*map(dense_heads, projected), unseen.contiguous())
        y, weights = (each.unflatten(0, (clients, sequences)) for each in found)
        return (y, weights), (0, 0)


def sizes_of(q: Tensor, k: Tensor, v: Tensor, unseen: Tensor) -> tuple[int, ...]:
    """The sizes that the compiled kernels take: how far masks are apart, (N, T, H, d), and strides."""
    strides = (stride for each in (q, k, v) for stride in each.stride()[:3])
    return unseen.shape[-1] ** 2 if unseen.ndim == 3 else 0, *q.shape, *strides


def dense_heads(x: Tensor) -> Tensor:
    """The same numbers (…, d), those of a head at a place next to each other in memory."""
    return x if x.stride(-1) == 1 else x.contiguous()


def attended(q: Tensor, k: Tensor, v: Tensor, unseen: Tensor) -> Tensor | None:
    """`attended` of the workloads by the compiled kernel, for tensors that it can read."""
    if not supported(q, k, v) or not q.shape == k.shape == v.shape or not q.numel() or unseen.dtype != torch.bool:
        return None
    sequences, _, places, _ = q.shape
    if unseen.shape not in ((places, places), (sequences, 1, places, places)):
        return None  # masks that heads have of their own, or that torch repeats
    mask = unseen.squeeze(1) if unseen.ndim == 4 else unseen
    placed = (dense_heads(each.transpose(1, 2)) for each in (q, k, v))
    return Attention.apply(*placed, mask.contiguous())[0].flatten(2)


@contextmanager
def attention_in_one_call() -> Iterator[None]:
    """A context in which networks compute attention by the compiled kernel, and other operators as `native` does."""
    before = ONE_CALL.set(attended)
    try:
        with native_operators():
            yield
    finally:
        ONE_CALL.reset(before)


class OneCallAttention(Native):
    """Compiled attention, beside what `native` has."""

    name: ClassVar[str] = "attention"
    instead_of: ClassVar[tuple[str, ...]] = ("native",)

    def is_promising(self, run: Run) -> bool:
        """Where the model has adapters: the products of frozen weights, which are most of the work, are those of all
        clients at once already. Other runs take it where they ask for it."""
        return bool(run.workload.pairs) and super().is_promising(run)

    def around_losses(self) -> AbstractContextManager[Any]:
        return attention_in_one_call()

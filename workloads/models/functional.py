"""Dropout by functions of torch in a `forward`, with draws from the key of the batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from .. import counted
from ..workload import UnfitOutput


def dropped(x: Tensor, key: Tensor, rate: float, drawn: int) -> Tensor:
    """x with entries set to zero with probability `rate`, and the others multiplied by 1 / (1 - rate). The first
    `drawn` axes have draws of their own. key: () int64."""
    if rate >= 1:
        return torch.zeros_like(x)
    shape = (*x.shape[:drawn], *[1] * (x.ndim - drawn))
    kept = counted.at_least(key.to(x.device), prod(shape), rate).view(shape)
    return torch.where(kept, x / (1 - rate), 0.0)


class KeyedFunctions(TorchFunctionMode):
    """A context in which `F.dropout`, its relatives for channels and `F.scaled_dot_product_attention` draw from a key.

    key: () int64 in training, None in evaluation, where a function that would draw raises UnfitOutput. `met`: how many
    of these functions were called. What writes in place draws from torch's global generator, as without this context.
    """

    def __init__(self, key: Tensor | None) -> None:
        super().__init__()
        self.key, self.met = key, 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        ours = OURS.get(func)
        if ours is None:
            return func(*args, **(kwargs or {}))
        self.met += 1
        return ours(self, func, *args, **(kwargs or {}))

    def next_key(self, function: str) -> Tensor:
        """The key of this call."""
        if self.key is None:
            raise UnfitOutput(
                f"{function} must draw in training alone, got a call that draws in an evaluation; give it "
                "training=self.training, or dropout_p=p if self.training else 0.0"
            )
        return counted.key(self.key, "function", self.met)

    def dropout(
        self, func: Callable[..., Tensor], input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        if not training or not p or inplace:
            return func(input, p, training, inplace)
        return dropped(input, self.next_key(f"F.{func.__name__}"), p, input.ndim if func is F.dropout else 2)

    def attention(
        self,
        func: Callable[..., Tensor],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """(…, T, value width) from (…, T, E), (…, S, E) and (…, S, value width), by the definition in torch's
        documentation."""
        if not dropout_p:
            more = {"enable_gqa": True} if enable_gqa else {}
            return func(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, **more)
        if enable_gqa:
            key, value = (each.repeat_interleave(query.shape[-3] // each.shape[-3], -3) for each in (key, value))
        scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, float("-inf"))
        elif attn_mask is not None:
            scores = scores + attn_mask
        drop_key = self.next_key("F.scaled_dot_product_attention")
        return dropped(scores.softmax(-1), drop_key, dropout_p, scores.ndim) @ value


OURS: dict[Callable[..., Any], Callable[..., Any]] = {
    **dict.fromkeys((F.dropout, F.dropout1d, F.dropout2d, F.dropout3d), KeyedFunctions.dropout),
    F.scaled_dot_product_attention: KeyedFunctions.attention,
}
"""Function of torch -> what is called in its place."""

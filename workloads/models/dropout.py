"""Dropout whose draws follow from the key of the batch: they are the same for a client alone, in a block and on any
worker. Srivastava et al. 2014; for whole rows, stochastic depth, Huang et al. 2016, arXiv:1603.09382."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..stateless import Keyed
from .functional import dropped


class Dropout(Keyed):
    """Dropout of entries, of channels, or of whole rows.

    In training it sets entries to zero with probability `rate` and multiplies the others by 1 / (1 - rate). With
    `channels`, it sets whole channels of inputs (B, C, …) to zero, as torch's Dropout1d, Dropout2d and Dropout3d do,
    and with `rows` all entries of an example, as stochastic depth does. `batch`: the axis of the examples.
    """

    def __init__(self, rate: float, channels: bool = False, rows: bool = False, batch: int = 0) -> None:
        super().__init__()
        if not 0 <= rate < 1:
            raise ValueError(f"0 <= dropout < 1 must hold, got dropout={rate}")
        self.rate, self.channels, self.rows, self.batch = rate, channels, rows, batch

    @property
    def p(self) -> float:
        """The rate, as torch's modules call it."""
        return self.rate

    def forward(self, x: Tensor) -> Tensor:
        """x: (B, …). The draws for an example depend on its place in the batch, not on the length of the batch."""
        if self.key is None or not self.rate:
            return x
        x = x.movedim(self.batch, 0) if self.batch else x
        found = dropped(x, self.key, self.rate, 1 if self.rows else 2 if self.channels else x.ndim)
        return found.movedim(0, self.batch) if self.batch else found


class Attention(nn.MultiheadAttention):
    """torch's attention, whose weights are dropped by a `Dropout` in training. In evaluation it is torch's own.

    An instance is a module of torch that `become_keyed` has changed; it has torch's parameters, by torch's names.
    """

    drop: Dropout

    @staticmethod
    def become_keyed(module: nn.MultiheadAttention) -> None:
        """Have a module of torch draw from the key of the batch. Raises ValueError for options that torch hardly uses:
        `add_bias_kv` and `add_zero_attn`."""
        if module.bias_k is not None or module.add_zero_attn:
            raise ValueError("has dropout beside add_bias_kv or add_zero_attn; leave out these, or the dropout")
        module.drop = Dropout(module.dropout)
        module.__class__ = Attention

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """The arguments and results are those of `nn.MultiheadAttention`, for inputs with an axis of examples."""
        if not self.training:
            return super().forward(
                query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            )
        if query.dim() != 3 or (is_causal and attn_mask is None):
            raise ValueError("attention with dropout needs inputs (B, T, width), and a mask where it is causal")
        given = (query, key, value) if self.batch_first else [each.transpose(0, 1) for each in (query, key, value)]
        q, k, v = (  # (B, heads, T, head)
            F.linear(each, weight, bias).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for each, (weight, bias) in zip(given, self._projections(), strict=True)
        )
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5  # (B, heads, T, S)
        if attn_mask is not None:
            mask = added(attn_mask, scores)  # (T, S), or (B * heads, T, S)
            scores = scores + (mask.unflatten(0, (-1, self.num_heads)) if mask.dim() == 3 else mask)
        if key_padding_mask is not None:
            scores = scores + added(key_padding_mask, scores)[:, None, None]
        weights = self.drop(scores.softmax(-1))
        out = self.out_proj((weights @ v).transpose(1, 2).flatten(2))
        out = out if self.batch_first else out.transpose(0, 1)
        if not need_weights:
            return out, None
        return out, weights.mean(1) if average_attn_weights else weights

    def _projections(self) -> list[tuple[Tensor, Tensor | None]]:
        """(weight, bias) of the queries, keys and values."""
        packed = self.in_proj_weight is not None
        own = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        weights = self.in_proj_weight.chunk(3) if packed else own
        biases = [None] * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        return list(zip(weights, biases, strict=True))


def added(mask: Tensor, scores: Tensor) -> Tensor:
    """A mask as torch's attention takes it, as numbers that are added to scores: those, or bits that are true where
    nothing is attended to."""
    if mask.dtype != torch.bool:
        return mask.to(scores.dtype)
    return torch.zeros_like(mask, dtype=scores.dtype).masked_fill(mask, float("-inf"))

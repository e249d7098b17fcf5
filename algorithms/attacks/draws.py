"""Random vectors of which a piece can be drawn alone: the numbers of `counted` at some coordinates of a long vector."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...workloads import counted


def uniform(key: Tensor, begin: int, end: int) -> Tensor:
    """`counted.uniform(key, P)[begin:end]`, for any P of at least `end`."""
    counters = torch.arange(begin, end, dtype=torch.int64)
    bits = counted.bits(key + counters * (0x9E3779B97F4A7C15 - (1 << 64)), 1)[:, 0]
    return counted.high_bits(bits, 53).to(torch.float64) * 2.0**-53


def normal(key: Tensor, length: int, begin: int, end: int) -> Tensor:
    """`counted.normal(key, length)[begin:end]`."""
    half = (length + 1) // 2
    parts = []
    for first, function in ((0, torch.cos), (half, torch.sin)):
        low, high = max(begin, first) - first, min(end, first + half, length) - first
        if low < high:
            radius = (-2 * torch.log1p(-uniform(key, low, high))).sqrt()
            parts.append(radius * function(2 * math.pi * uniform(key, half + low, half + high)))
    return torch.cat(parts)

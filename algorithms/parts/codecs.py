"""What survives the wire, and in how many bytes: encoders of a flat vector, and their decoders.

A code is made of tensors of the width that is sent, so bytes are counted, not declared. Codecs are pure and run under
vmap; `key`, (), is the randomness.

    TopK    the k largest magnitudes, and their places in ceil(log2 n) bits each; a contraction, biased
    RandK   k random entries, places from a key that is sent in their stead, 8 bytes; times n / k it is unbiased
    Signs   + or - alpha entry by entry, 1 bit each and alpha; at random, of mean clip(v, -alpha, alpha)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...workloads import counted


def pack(bits: Tensor) -> Tensor:
    """(n,) of 0 and 1 -> (ceil(n / 8),) uint8, the first bit lowest."""
    padded = torch.cat([bits.to(torch.uint8), bits.new_zeros(-len(bits) % 8, dtype=torch.uint8)]).view(-1, 8)
    weights = torch.tensor([1 << place for place in range(8)], dtype=torch.uint8, device=bits.device)
    return (padded * weights).sum(-1, dtype=torch.uint8)


def unpack(packed: Tensor, count: int) -> Tensor:
    """(count,) uint8 of 0 and 1."""
    places = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed.unsqueeze(-1) >> places) & 1).reshape(-1)[:count]


def width(n: int) -> int:
    """Bits that number n places."""
    return max(1, (n - 1).bit_length())


def pack_places(places: Tensor, n: int) -> Tensor:
    """(k,) int64 below n -> (ceil(k width / 8),) uint8."""
    shifts = torch.arange(width(n), device=places.device)
    return pack(((places.unsqueeze(-1) >> shifts) & 1).reshape(-1))


def unpack_places(packed: Tensor, count: int, n: int) -> Tensor:
    bits = unpack(packed, count * width(n)).view(count, width(n)).to(torch.int64)
    return (bits << torch.arange(width(n), device=packed.device)).sum(-1)


class Codec(ABC):
    @abstractmethod
    def describe(self, n: int) -> tuple[str, float]:
        """(what is sent of n numbers, how many it counts as, places not counted)."""

    @abstractmethod
    def encode(self, v: Tensor, key: Tensor) -> Any:
        """v: (n,)."""

    @abstractmethod
    def decode(self, code: Any, n: int) -> Tensor:
        """(n,)."""


def share(ratio: float, n: int) -> int:
    """k of n for a ratio, 1 at least."""
    return max(1, int(ratio * n))


class Identity(Codec):
    """All of it."""

    def describe(self, n: int) -> tuple[str, float]:
        return "all", n

    def encode(self, v: Tensor, key: Tensor) -> Tensor:
        return v

    def decode(self, code: Tensor, n: int) -> Tensor:
        return code


class Sparse(NamedTuple):
    values: Tensor  # (k,)
    places: Tensor  # (bytes,) uint8


@dataclass(frozen=True)
class TopK(Codec):
    ratio: float

    cost_of_message = 0.25
    """Numbers of 32 bits that a message costs beside its values: places are filled up to a byte."""

    @staticmethod
    def cost_of_value(n: int) -> float:
        """Numbers of 32 bits that one of n entries costs, with its place."""
        return 1 + width(n) / 32

    def describe(self, n: int) -> tuple[str, float]:
        return f"{share(self.ratio, n):,} largest", share(self.ratio, n)

    def encode(self, v: Tensor, key: Tensor) -> Sparse:
        places = v.abs().topk(share(self.ratio, len(v)), sorted=False).indices
        return Sparse(v.gather(0, places), pack_places(places, len(v)))

    def decode(self, code: Sparse, n: int) -> Tensor:
        places = unpack_places(code.places, len(code.values), n)
        return code.values.new_zeros(n).scatter(0, places, code.values)


class Sampled(NamedTuple):
    values: Tensor  # (k,)
    key: Tensor  # (), int64


@dataclass(frozen=True)
class RandK(Codec):
    ratio: float
    unbiased: bool = False

    cost_of_message = 2.0
    """Numbers of 32 bits that a message costs beside its values: the key."""

    @staticmethod
    def cost_of_value(n: int) -> float:
        """Numbers of 32 bits that one of n entries costs; its place follows from the key."""
        return 1.0

    def describe(self, n: int) -> tuple[str, float]:
        return f"{share(self.ratio, n):,} at random", share(self.ratio, n)

    def places(self, key: Tensor, n: int) -> Tensor:
        """(k,) different ones: those of the largest of n draws."""
        return counted.uniform(key, n).topk(share(self.ratio, n), sorted=False).indices

    def encode(self, v: Tensor, key: Tensor) -> Sampled:
        return Sampled(v.gather(0, self.places(key, len(v))), key)

    def decode(self, code: Sampled, n: int) -> Tensor:
        scale = n / len(code.values) if self.unbiased else 1.0
        return code.values.new_zeros(n).scatter(0, self.places(code.key, n), code.values * scale)


class Bits(NamedTuple):
    bits: Tensor  # (ceil(n / 8),) uint8
    alpha: Tensor  # ()


def signs(v: Tensor, alpha: Tensor, key: Tensor) -> Tensor:
    """(n,) bool, true with probability clip((1 + v / alpha) / 2, 0, 1); a half where alpha is 0."""
    tiny = torch.finfo(v.dtype).tiny
    return counted.uniform(key, len(v)) < (1 + v / alpha.clamp(min=tiny)) / 2


@dataclass(frozen=True)
class Signs(Codec):
    """alpha is the mean magnitude."""

    def describe(self, n: int) -> tuple[str, float]:
        return "1 bit each", n / 32 + 1

    def encode(self, v: Tensor, key: Tensor) -> Bits:
        alpha = v.abs().mean()
        return Bits(pack(signs(v, alpha, key)), alpha)

    def decode(self, code: Bits, n: int) -> Tensor:
        return (2 * unpack(code.bits, n).to(code.alpha.dtype) - 1) * code.alpha

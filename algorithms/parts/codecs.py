"""Codecs: how a flat vector is encoded before it is sent, and decoded where it arrives.

A code consists of tensors of the width that is sent, so that its bytes are counted and not declared. Codecs are pure
functions and run under vmap; `key`, (), is the randomness.

    TopK    the k largest magnitudes, and their indices in ceil(log2 n) bits each; a contraction, biased
    RandK   k random entries; a key of 8 bytes is sent instead of their indices; multiplied by n / k it is unbiased
    Signs   + or - alpha entry by entry, 1 bit each and alpha; random, with mean clip(v, -alpha, alpha)

Those that experiments choose by name, from the table CODECS, are in `quantisers`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ...workloads import counted


def pack(bits: Tensor) -> Tensor:
    """(n,) of 0 and 1 -> (ceil(n / 8),) uint8; the first bit is the lowest of its byte."""
    padded = torch.cat([bits.to(torch.uint8), bits.new_zeros(-len(bits) % 8, dtype=torch.uint8)]).view(-1, 8)
    weights = torch.ones(8, dtype=torch.uint8, device=bits.device) << torch.arange(
        8, dtype=torch.uint8, device=bits.device
    )
    return (padded * weights).sum(-1, dtype=torch.uint8)


def unpack(packed: Tensor, count: int) -> Tensor:
    """The inverse of `pack`: (count,) uint8 of 0 and 1."""
    places = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed.unsqueeze(-1) >> places) & 1).reshape(-1)[:count]


def width(n: int) -> int:
    """Bits that one index below n needs."""
    return max(1, (n - 1).bit_length())


def pack_numbers(numbers: Tensor, bits: int) -> Tensor:
    """Whole numbers (k,) int64 from 0 to 2^bits - 1 -> (ceil(k bits / 8),) uint8."""
    each = [((numbers >> place) & 1).to(torch.uint8) for place in range(bits)]  # 1 byte a bit, not the 8 of an int64
    return pack(torch.stack(each, -1).reshape(-1))


def unpack_numbers(packed: Tensor, count: int, bits: int) -> Tensor:
    """The inverse of `pack_numbers`: (count,) int64."""
    each = unpack(packed, count * bits).view(count, bits)
    found = each[:, 0].to(torch.int64)
    for place in range(1, bits):
        found = found + (each[:, place].to(torch.int64) << place)
    return found


def pack_places(places: Tensor, n: int) -> Tensor:
    """Indices (k,) int64 below n -> (ceil(k width(n) / 8),) uint8."""
    return pack_numbers(places, width(n))


def unpack_places(packed: Tensor, count: int, n: int) -> Tensor:
    """The inverse of `pack_places`: (count,) int64."""
    return unpack_numbers(packed, count, width(n))


class Codec(ABC):
    """An encoder of flat vectors and its decoder."""

    @abstractmethod
    def describe(self, n: int) -> tuple[str, float]:
        """For tables: (what is sent of n numbers, in words; how many numbers that is, without indices)."""

    @abstractmethod
    def encode(self, v: Tensor, key: Tensor) -> Any:
        """What is sent of v, (n,); `key`: (), the randomness."""

    @abstractmethod
    def decode(self, code: Any, n: int) -> Tensor:
        """The vector (n,) that the code stands for."""


class Coder(Codec):
    """A codec of the table CODECS. It knows its bytes from the length of a vector alone."""

    table: ClassVar[str] = "CODECS"
    """The registry's table of such parts."""

    random: ClassVar[bool] = False
    """Whether `encode` uses its key."""

    unbiased: ClassVar[bool] = False
    """Whether the mean of what is decoded, over all keys, is the vector, but for the rounding of floats."""

    @abstractmethod
    def bytes(self, n: int) -> int:
        """The bytes of the code of n numbers of 4 bytes."""

    @abstractmethod
    def words(self, n: int) -> str:
        """What is sent of n numbers, in words."""

    def of_shape(self, shape: tuple[int, ...]) -> Coder:
        """The codec of the flat vector of a tensor of this shape: another one where the shape decides what belongs
        together."""
        return self

    def describe(self, n: int) -> tuple[str, float]:
        return self.words(n), self.bytes(n) / 4


def share(ratio: float, n: int) -> int:
    """k, the number of entries that are sent of n; at least 1."""
    return max(1, int(ratio * n))


@dataclass(frozen=True)
class Identity(Coder):
    """the vector as it is"""

    unbiased: ClassVar[bool] = True

    def bytes(self, n: int) -> int:
        return 4 * n

    def words(self, n: int) -> str:
        return "all"

    def encode(self, v: Tensor, key: Tensor) -> Tensor:
        return v

    def decode(self, code: Tensor, n: int) -> Tensor:
        return code


class Sparse(NamedTuple):
    values: Tensor  # (k,)
    places: Tensor  # (bytes,) uint8, packed indices


@dataclass(frozen=True)
class TopK(Codec):
    """The largest magnitudes; `ratio`: k / n."""

    ratio: float

    cost_of_message = 0.25
    """What a message costs besides its entries, in numbers of 32 bits: the indices are padded to a whole byte."""

    @staticmethod
    def cost_of_value(n: int) -> float:
        """What one of n entries costs with its index, in numbers of 32 bits."""
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
    """Random entries; `ratio`: k / n; `unbiased`: multiplied by n / k."""

    ratio: float
    unbiased: bool = False

    cost_of_message = 2.0
    """What a message costs besides its entries, in numbers of 32 bits: the key."""

    @staticmethod
    def cost_of_value(n: int) -> float:
        """What one of n entries costs, in numbers of 32 bits; its index follows from the key."""
        return 1.0

    def describe(self, n: int) -> tuple[str, float]:
        return f"{share(self.ratio, n):,} at random", share(self.ratio, n)

    def places(self, key: Tensor, n: int) -> Tensor:
        """(k,) different indices: those of the k largest of n random numbers."""
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
    """(n,) bool, true with probability clip((1 + v / alpha) / 2, 0, 1), which is 1/2 where v and alpha are 0."""
    tiny = torch.finfo(v.dtype).tiny
    return counted.uniform(key, len(v)) < (1 + v / alpha.clamp(min=tiny)) / 2


@dataclass(frozen=True)
class Signs(Codec):
    """Random signs times alpha, the mean magnitude."""

    def describe(self, n: int) -> tuple[str, float]:
        return "1 bit each", n / 32 + 1

    def encode(self, v: Tensor, key: Tensor) -> Bits:
        alpha = v.abs().mean()
        return Bits(pack(signs(v, alpha, key)), alpha)

    def decode(self, code: Bits, n: int) -> Tensor:
        return (2 * unpack(code.bits, n).to(code.alpha.dtype) - 1) * code.alpha

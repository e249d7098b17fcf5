"""Counted randomness: every draw is a pure function of a key, and does not depend on the draws before it.

A key is an int64 tensor, computed from (seed, purpose, client, round or step, ...) by the finaliser of SplitMix64
(Steele, Lea, Flood 2014), whose output passes BigCrush on consecutive counters. All functions are elementwise in the
axes of the key and run under `torch.func.vmap`, so a client draws the same numbers alone and in a block. No global
random state is read or written.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache, partial
from hashlib import blake2b
from typing import Any, TypeVar, overload

import numpy as np
import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.library import Library

Words = TypeVar("Words", Tensor, np.ndarray)
"""An int64 tensor or array. numpy is faster for small arrays."""

# 64-bit constants as torch's signed integers; arithmetic wraps modulo 2^64.
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX2 = 0x94D049BB133111EB - (1 << 64)
_ALL = (1 << 64) - 1
AT_ONCE = 2048
"""The draws that are made at once where they are not made by torch: two arrays of them fit into the smallest caches."""


def _shift(x: Words, bits: int) -> Words:
    """Logical shift to the right; `>>` would copy the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Words) -> Words:
    """SplitMix64's finaliser."""
    x = (x ^ _shift(x, 30)) * _MIX1
    x = (x ^ _shift(x, 27)) * _MIX2
    return x ^ _shift(x, 31)


@lru_cache(256)
def _word(part: int | str) -> int:
    """A number modulo 2^64, or the digest of a string, as a signed 64-bit integer."""
    if isinstance(part, str):
        return int.from_bytes(blake2b(part.encode(), digest_size=8).digest(), "little", signed=True)
    return (int(part) + (1 << 63)) % (1 << 64) - (1 << 63)


@overload
def key(*parts: int | str | Tensor) -> Tensor: ...
@overload
def key(*parts: int | str | np.ndarray) -> np.ndarray: ...
def key(*parts):
    """One key, int64, from parts that are broadcast against each other. Strings name the purpose of a draw, and keys of
    different purposes are independent. The result is a numpy array if a part is one, else a tensor."""
    lead = next((i for i, part in enumerate(parts) if isinstance(part, Tensor | np.ndarray)), len(parts))
    folded: Any = _constant(parts[:lead])
    for part in parts[lead:]:
        if not isinstance(part, Tensor | np.ndarray):
            part = _word(part)
        elif isinstance(part, Tensor) and isinstance(folded, Tensor):
            folded = folded.to(part.device)
        folded = _mix((folded ^ part) + _GOLDEN)
    return torch.tensor(folded) if isinstance(folded, int) else folded


@lru_cache(256)
def _constant(parts: tuple[int | str, ...]) -> int:
    """The key of leading numbers and strings; cached, since the keys of a run begin with the same few of them."""
    folded = 0
    for part in parts:
        folded = _mix_one(((folded ^ _word(part)) + _GOLDEN) & _ALL)
    return _word(folded)


def _mix_one(x: int) -> int:
    """`_mix` of one number modulo 2^64, as Python's integers, which are ten times faster for it than a tensor."""
    x = ((x ^ (x >> 30)) * _MIX1) & _ALL
    x = ((x ^ (x >> 27)) * _MIX2) & _ALL
    return x ^ (x >> 31)


def bits(key: Tensor, count: int) -> Tensor:
    """(..., count) int64 from keys (...): 64 uniform bits each."""
    counter = torch.arange(1, count + 1, device=key.device, dtype=torch.int64)
    return _mix(key.unsqueeze(-1) + counter * _GOLDEN)


def high_bits(draws: Words, count: int) -> Words:
    """The upper `count` bits of uniform int64 draws as non-negative integers."""
    return _shift(draws, 64 - count)


def uniform(key: Tensor, count: int) -> Tensor:
    """(..., count) float64 from keys (...), uniform in [0, 1)."""
    return high_bits(bits(key, count), 53).to(torch.float64) * 2.0**-53


def at_least(key: Tensor, count: int, least: float) -> Tensor:
    """(..., count) bool from keys (...): whether `uniform(key, count)` is at least this number, 0 <= least < 1."""
    if key.ndim or key.device.type != "cpu" or is_functorch_wrapped_tensor(key):
        return uniform(key, count) >= least
    return torch.ops.fedfleet.at_least(key, count, least)


# An operation of torch, so that a recording of operations has it as one.
_OPERATIONS = Library("fedfleet", "DEF")
_OPERATIONS.define("at_least(Tensor key, int count, float least) -> Tensor")


@partial(_OPERATIONS.impl, "at_least", dispatch_key="CPU")
def _at_least_of_one(key: Tensor, count: int, least: float) -> Tensor:
    return torch.from_numpy(_at_least(int(key), count, least))


def _at_least(key: int, count: int, least: float) -> np.ndarray:
    """(count,) bool: `at_least` for one key. It has the same bits, since a draw is a whole number of 2^-53 and is
    compared as one; it takes a fifth of the time, since all steps for some draws stay in the cache."""
    found = np.empty(count, dtype=bool)
    limit = np.uint64(math.ceil(least * 2.0**53) << 11)
    first, other = np.empty(AT_ONCE, np.uint64), np.empty(AT_ONCE, np.uint64)
    for begin in range(0, count, AT_ONCE):
        size = min(AT_ONCE, count - begin)
        x, shifted = first[:size], other[:size]
        np.add(_multiples()[:size], np.uint64((key + begin * _GOLDEN) & _ALL), out=x)
        for bits, factor in ((30, _MIX1), (27, _MIX2), (31, None)):
            np.right_shift(x, np.uint64(bits), out=shifted)
            np.bitwise_xor(x, shifted, out=x)
            if factor is not None:
                np.multiply(x, np.uint64(factor & _ALL), out=x)
        np.greater_equal(x, limit, out=found[begin : begin + size])
    return found


@lru_cache(1)
def _multiples() -> np.ndarray:
    """(AT_ONCE,) uint64: the multiples of _GOLDEN from the first on, modulo 2^64."""
    return np.arange(1, AT_ONCE + 1, dtype=np.uint64) * np.uint64(_GOLDEN & _ALL)


def normal(key: Tensor, count: int) -> Tensor:
    """(..., count) float64 from keys (...), standard normal by the method of Box and Muller."""
    half = (count + 1) // 2
    u = uniform(key, 2 * half)
    radius = (-2 * torch.log1p(-u[..., :half])).sqrt()
    angle = 2 * math.pi * u[..., half:]
    return torch.cat([radius * angle.cos(), radius * angle.sin()], -1)[..., :count]


def generator(*parts: int | str) -> torch.Generator:
    """A new torch generator seeded with the key of `parts`, for draws that happen once."""
    return torch.Generator().manual_seed(int(_shift(key(*parts), 1)))


def numpy_generator(*parts: int | str) -> np.random.Generator:
    """A new numpy generator (Philox) seeded with the key of `parts`, for draws that happen once and need numpy's
    distributions, as partitions do."""
    return np.random.Generator(np.random.Philox(key=int(key(*parts)) % (1 << 64)))


def numpy_generators(keys: np.ndarray) -> Iterator[np.random.Generator]:
    """For each key, (n,) int64, a generator that gives what `numpy_generator` gives for the parts of this key.

    It is one object whose state is set anew for every key, which takes a tenth of the time of making it anew."""
    philox = np.random.Philox(key=0)
    generator, state = np.random.Generator(philox), philox.state
    for word in keys.astype(np.uint64):
        state["state"]["key"][0] = word
        philox.state = state
        yield generator

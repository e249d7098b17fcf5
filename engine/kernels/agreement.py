"""Whether a fast path computes what plain code computes: the one comparison of all proofs.

Results agree to the bit, or within rounding. Then a difference may be `FACTOR` times that which another order of the
same sums makes for the plain code, and `ROUNDINGS` of a tensor's largest entry in any case. At a kink of ReLU or max
pooling a rounding error changes a gradient abruptly; there, changes that perturbed weights cause are allowed as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

FACTOR = 8.0
"""The factor by which another order of the same sums may exceed the rounding error of one order."""
ROUNDINGS = 64 * 2.0**-23
"""The share of a tensor's largest entry that is always allowed to code that computes in float32, whatever it is given:
so many roundings of terms of this size."""


@dataclass(frozen=True)
class Rounding:
    """The tolerance for other orders of sums. `other`: the plain result in another order or precision, whose distance
    from the plain one is a rounding error. `least`: the least value that a tensor's largest entry counts as. `kinks`:
    gives by how much perturbed weights change each entry; it is called only if rounding explains too little. `share`:
    of a tensor's largest entry, which is allowed in any case."""

    other: Sequence[Tensor]
    least: float = 0.0
    kinks: Callable[[], Sequence[Tensor]] | None = None
    share: float = ROUNDINGS


TO_THE_BIT = None
"""The tolerance that allows no difference. NaN equals NaN."""


class Excess(NamedTuple):
    """A tensor differs by more than its tolerance. place: among the tensors. off: the largest difference, NaN if it is
    not measured. allowed: the largest that is allowed. size: the largest entry of the plain tensor, or `least`."""

    place: int
    off: float
    allowed: float
    size: float


class Disagreement(Exception):
    """Kernels must not be used. The message says why.

    `torch_fails`: whether the reason is that torch's own kernels fail on the same data.
    """

    def __init__(self, reason: str, torch_fails: bool = False) -> None:
        super().__init__(reason)
        self.torch_fails = torch_fails


def exceeding(
    plain: Sequence[Tensor], fast: Sequence[Tensor], tolerance: Rounding | None = TO_THE_BIT
) -> Iterator[Excess]:
    """Those of some tensors of a fast path that differ too much from the plain ones."""
    for place, (expected, found) in enumerate(zip(plain, fast, strict=True)):
        if tolerance is None:
            if not equal(expected, found):
                yield Excess(place, math.nan, 0.0, math.nan)
            continue
        off, error = distance(expected, found), distance(expected, tolerance.other[place])
        size = max(largest_entry(expected), tolerance.least)
        allowed = FACTOR * error + tolerance.share * size
        if not off <= allowed and tolerance.kinks is not None:
            allowed += FACTOR * largest_entry(tolerance.kinks()[place])
        if not off <= allowed:
            yield Excess(place, off, allowed, size)


def agrees(plain: Sequence[Tensor], fast: Sequence[Tensor], tolerance: Rounding | None = TO_THE_BIT) -> bool:
    """Whether the tensors of a fast path are the plain ones, as far as the tolerance asks for it."""
    return next(exceeding(plain, fast, tolerance), None) is None


def distance(expected: Tensor, found: Tensor) -> float:
    """The largest absolute difference of two tensors."""
    return largest_entry(found.double() - expected)


def largest_entry(tensor: Tensor) -> float:
    """The largest absolute value in a tensor, 0 if it is empty."""
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def equal(a: Any, b: Any) -> bool:
    """Whether two values have the same type, shape and bits. NaN equals NaN."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.shape == b.shape and a.dtype == b.dtype and same_bits(a, b)
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, tuple | list):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    return a is b or (type(a) is type(b) and (a == b or repr(a) == repr(b)))


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of the same shape and dtype have equal entries, where NaN equals NaN."""
    if a.layout != torch.strided or b.layout != torch.strided:
        return a.layout == b.layout and same_bits(a.to_dense(), b.to_dense())
    return torch.equal(a, b) or (a.is_floating_point() and torch.equal(a.nan_to_num(0.5), b.nan_to_num(0.5)))

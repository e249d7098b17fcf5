"""Two groups of parameters, for min-max problems: min over the primal, max over the dual.

The name decides. A tensor whose name begins with `dual.` is dual; any other one, as `primal.net.weight`, is primal. The
workload reverses the sign of the dual's gradient, so that its gradient is a descent direction on both groups. So a
method needs no code for groups. Only a setting may be one number for each group, `lr: {primal: 0.01, dual: 0.1}`. For a
model with one group alone the other group's number has no effect, and the arithmetic is that of a plain number, to the
bit: a min-max method without a dual group is its minimisation.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

DUAL = "dual."


@dataclass(frozen=True)
class PerGroup:
    """A number for each group of parameters, with the arithmetic of numbers."""

    primal: float
    dual: float

    def __mul__(self, other: Number) -> PerGroup:
        p, d = both(other)
        return PerGroup(self.primal * p, self.dual * d)

    __rmul__ = __mul__

    def __truediv__(self, other: Number) -> PerGroup:
        p, d = both(other)
        return PerGroup(self.primal / p, self.dual / d)

    def __rtruediv__(self, other: float) -> PerGroup:
        return PerGroup(other / self.primal, other / self.dual)

    def __rsub__(self, other: float) -> PerGroup:
        return PerGroup(other - self.primal, other - self.dual)

    def __neg__(self) -> PerGroup:
        return PerGroup(-self.primal, -self.dual)


Number = float | PerGroup


def both(number: Number) -> tuple[float, float]:
    """(primal, dual): the numbers of the two groups; a plain number is that of both."""
    return (number.primal, number.dual) if isinstance(number, PerGroup) else (number, number)


def is_dual(name: str) -> bool:
    return name.startswith(DUAL)


def at(number: Number, name: str) -> float:
    """The number for the tensor of this name."""
    return both(number)[is_dual(name)]


def sides(names: Iterable[str]) -> tuple[bool, ...]:
    """Which groups the names belong to: (False,) for the primal alone, (True,) for the dual alone, (False, True) for
    both."""
    return tuple(sorted({is_dual(name) for name in names}))


@lru_cache(maxsize=8)
def dual_places(names: tuple[str, ...], sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """(P,) bool: whether each number of a flat vector is dual; `sizes`: of the named tensors."""
    return torch.cat([torch.full((n,), is_dual(name), device=device) for name, n in zip(names, sizes, strict=True)])

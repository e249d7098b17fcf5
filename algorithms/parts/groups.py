"""Two groups of parameters, for min-max problems: min over the primal, max over the dual.

Names decide. A tensor whose name begins with `dual.` is dual; any other, as `primal.net.weight`, is primal. Min-max is
a sign, and the workload has it: its gradient is a descent direction on both groups (on the dual, minus the gradient of
the objective). So a method needs to know nothing of groups, but that a number of its settings may be one for each,
`lr: {primal: 0.01, dual: 0.1}`. Where there is one group only, the other's number has no effect and the arithmetic is
that of a plain number, to the bit: a method without a dual group is its minimisation.
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
    """A number for each group; with the arithmetic of numbers."""

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
    """(primal, dual)."""
    return (number.primal, number.dual) if isinstance(number, PerGroup) else (number, number)


def is_dual(name: str) -> bool:
    return name.startswith(DUAL)


def at(number: Number, name: str) -> float:
    """The number for a tensor of this name."""
    return both(number)[is_dual(name)]


def sides(names: Iterable[str]) -> tuple[bool, ...]:
    """Which groups there are: (False,) the primal alone, (True,) the dual alone, (False, True)."""
    return tuple(sorted({is_dual(name) for name in names}))


@lru_cache(maxsize=8)
def dual_places(names: tuple[str, ...], sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """(P,) bool: which numbers of a flat vector are dual."""
    return torch.cat([torch.full((n,), is_dual(name), device=device) for name, n in zip(names, sizes, strict=True)])

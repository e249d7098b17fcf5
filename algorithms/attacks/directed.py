"""Directed deviation: in every coordinate beyond the range of the honest values, against the sign of their mean.

Fang et al., USENIX Security 2020, arXiv:1911.11815, without knowledge of the rule. With b = 2:

    mean < 0: uniform in [max, b max] if max > 0, else in [max, max / b]
    mean > 0: uniform in [min / b, min] if min > 0, else in [b min, min];  mean = 0: 0
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from . import draws
from .contract import CohortAttack, Columns


@dataclass(frozen=True, kw_only=True)
class Directed(CohortAttack):
    """b: how far beyond the range, as a factor."""

    b: float = 2.0
    called: ClassVar[str] = "directed"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.b > 1:
            raise ValueError(f"b > 1 must hold, got b={self.b}")

    def forge(self, x: Columns) -> np.ndarray:
        low, high = x.rows.min(axis=0), x.rows.max(axis=0)
        uniform = draws.uniform(x.key, x.begin, x.end).numpy()
        above = np.where(high > 0, high + uniform * (self.b * high - high), high + uniform * (high / self.b - high))
        below = np.where(
            low > 0, low / self.b + uniform * (low - low / self.b), self.b * low * (1 - uniform) + uniform * low
        )
        return np.where(x.mean < 0, above, np.where(x.mean > 0, below, 0.0))

"""The majority of signs: in each coordinate the sign that most messages have, times a scale.

Bernstein et al., ICLR 2019, arXiv:1810.05291.

    scale sign(sum of sign(x_i)),  sign(0) = 0; a tie gives 0

Sums of signs are exact in float64. Workers add them up, and no message is stored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from torch import Tensor

from .contract import Aggregator
from .messages import Answer, Messages


@dataclass(frozen=True, kw_only=True)
class SignVote(Aggregator):
    """scale: the magnitude of each coordinate of the answer, or "median_norm": the median of |x_i| / sqrt(P)."""

    scale: float | Literal["median_norm"] = "median_norm"

    by: ClassVar[Literal["weights", "columns"]] = "columns"
    adds: ClassVar[bool] = True
    called: ClassVar[str] = "the vote of signs"
    takes_weights: ClassVar[bool] = False
    steps: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.scale != "median_norm" and not self.scale > 0:
            raise ValueError(f"scale > 0 must hold, got scale={self.scale}")

    def magnitude(self, x: Messages) -> float:
        """The magnitude of each coordinate of the answer."""
        relative = self.scale == "median_norm"
        return float(np.median(x.norms)) / x.length**0.5 if relative else float(self.scale)

    def aggregate(self, x: Messages) -> Answer:
        return x.by_coordinate(self.magnitude(x))

    def columns(self, x: np.ndarray, f: int) -> np.ndarray:
        return np.sign(np.sign(x).sum(axis=0, dtype=np.float64))

    def contribution(self, x: Tensor, y: Tensor) -> Tensor:
        return y.nan_to_num(0.0).sign() * x.isfinite().all()

    def from_sum(self, total: Tensor, weight: float, x: Messages) -> Tensor:
        return total.sign() * self.magnitude(x)

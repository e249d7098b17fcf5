"""The trimmed mean: of each coordinate's S values the f least and the f greatest are left out.

Yin et al., ICML 2018, arXiv:1803.01498.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from .contract import Aggregator, Decision, Faults, Rows


@dataclass(frozen=True, kw_only=True)
class TrimmedMean(Aggregator):
    """f: the number of values that are left out on each side."""

    f: Faults

    by: ClassVar[Literal["weights", "columns"]] = "columns"
    called: ClassVar[str] = "a trimmed mean"
    condition: ClassVar[str] = "2 f < S"
    takes_weights: ClassVar[bool] = False

    def fewest(self, f: int) -> int:
        return 2 * f + 1

    def is_mean(self, rows: int, f: int) -> bool:
        return f == 0

    def decide(self, rows: Rows, state: Any) -> Decision:
        return Decision()

    def columns(self, x: np.ndarray, f: int) -> np.ndarray:
        return np.add.reduce(x[f : len(x) - f], axis=0, dtype=np.float64) / (len(x) - 2 * f)

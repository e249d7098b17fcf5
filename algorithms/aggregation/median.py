"""The coordinate-wise median: the middle one of a coordinate's S values, or the mean of the two in the middle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from .contract import Aggregator, Decision, Rows


@dataclass(frozen=True, kw_only=True)
class Median(Aggregator):
    """It gives way when half of the messages are Byzantine."""

    by: ClassVar[Literal["weights", "columns"]] = "columns"
    called: ClassVar[str] = "the median"
    takes_weights: ClassVar[bool] = False

    def decide(self, rows: Rows, state: Any) -> Decision:
        return Decision()

    def columns(self, x: np.ndarray, f: int) -> np.ndarray:
        return median(x)


def median(x: np.ndarray) -> np.ndarray:
    """(C,) float64: the medians of the columns of x, (S, C), which are in ascending order."""
    middle = len(x) // 2
    upper = x[middle].astype(np.float64)
    return upper if len(x) % 2 else (x[middle - 1].astype(np.float64) + upper) / 2

"""The coordinate-wise median: the middle one of a coordinate's S values, or the mean of the two in the middle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from .contract import ByCoordinate


@dataclass(frozen=True, kw_only=True)
class Median(ByCoordinate):
    """It gives way when half of the messages are Byzantine."""

    called: ClassVar[str] = "the median"

    def columns(self, x: np.ndarray, f: int) -> np.ndarray:
        return median(x)


def median(x: np.ndarray) -> np.ndarray:
    """(C,) float64: the medians of the columns of x, (S, C), which are in ascending order."""
    middle = len(x) // 2
    upper = x[middle].astype(np.float64)
    return upper if len(x) % 2 else (x[middle - 1].astype(np.float64) + upper) / 2

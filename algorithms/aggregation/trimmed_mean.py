"""The trimmed mean: of each coordinate's S values the f least and the f greatest are left out.

Yin et al., ICML 2018, arXiv:1803.01498.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from .contract import ByCoordinate, FewerThanHalf


@dataclass(frozen=True, kw_only=True)
class TrimmedMean(ByCoordinate, FewerThanHalf):
    """f: the number of values that are left out on each side."""

    called: ClassVar[str] = "a trimmed mean"

    def columns(self, x: np.ndarray, f: int) -> np.ndarray:
        return np.add.reduce(x[f : len(x) - f], axis=0, dtype=np.float64) / (len(x) - 2 * f)

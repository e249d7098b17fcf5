"""MeaMed: of each coordinate's S values the mean of the S - f that are nearest to their median.

Xie et al., 2018, arXiv:1802.10116. The nearest values are consecutive ones of the sorted values: of the f + 1 windows
a_(j) … a_(j + S - f - 1) the one with the least max(median - a_(j), a_(j + S - f - 1) - median), the leftmost if there
are several. So it is a rule about values, and not about rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from .contract import ByCoordinate, FewerThanHalf
from .median import median


@dataclass(frozen=True, kw_only=True)
class Meamed(ByCoordinate, FewerThanHalf):
    """f: the number of values that are left out."""

    called: ClassVar[str] = "MeaMed"

    def columns(self, x: np.ndarray, f: int) -> np.ndarray:
        return mean_around_median(x, f)


def mean_around_median(x: np.ndarray, left_out: int) -> np.ndarray:
    """(C,) float64: the mean of all but `left_out` of the values nearest to the median of each column. x: (S, C), each
    column in ascending order."""
    keep = len(x) - left_out
    middle = median(x)
    widths = [np.maximum(middle - x[j], x[j + keep - 1] - middle) for j in range(left_out + 1)]
    first = np.argmin(np.stack(widths), axis=0)
    total = np.zeros(x.shape[1])
    for place in range(keep):
        total += np.take_along_axis(x, first[None] + place, axis=0)[0]
    return total / keep

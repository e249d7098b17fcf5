"""Clipped clustering: messages shortened to the median norm of all rounds, then the larger of two clusters by angle.

Li, Ngai, Voigt, IEEE Transactions on Big Data 2023.

    t = min(most, median of all norms of all rounds so far);  rows are shortened to norm t
    two clusters by average linkage on 1 - cos(x_i, x_j), 2 with a row of zeros
    answer: the mean of the shortened rows of the larger cluster, of equal ones of that with the first row
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from .contract import Aggregator
from .messages import Answer, Messages, shortening


@dataclass(frozen=True, kw_only=True)
class ClippedClustering(Aggregator):
    """most: the largest norm, whatever the norms seen."""

    most: float = 1e5

    pairwise: ClassVar[bool] = True
    called: ClassVar[str] = "clipped clustering"
    condition: ClassVar[str] = "S >= 3"

    def __post_init__(self) -> None:
        if not self.most > 0:
            raise ValueError(f"most > 0 must hold, got most={self.most}")

    def fewest(self, f: int) -> int:
        return 3

    def init(self, length: int) -> Any:
        """The norms seen so far."""
        return torch.zeros(0, dtype=torch.float64)

    def aggregate(self, x: Messages) -> Answer:
        gram = x.gram()
        norms = np.sqrt(np.maximum(np.diagonal(gram), 0.0))
        seen = np.concatenate([x.state.numpy(), norms])
        bound = min(self.most, float(np.median(seen)))
        sizes = norms[:, None] * norms[None, :]
        angles = 1 - np.divide(gram, sizes, out=np.full_like(sizes, -1.0), where=sizes > 0)
        kept = larger_of_two(angles)
        return x.average(kept, shortening(norms, bound))._replace(state=torch.from_numpy(seen))


def larger_of_two(distances: np.ndarray) -> np.ndarray:
    """(S,) bool: the larger of two clusters by average linkage; of equal ones that with the first row.

    The nearest two clusters are joined until two are left; of several pairs the first one by the clusters' first rows.
    """
    count = len(distances)
    members = [[row] for row in range(count)]
    apart = distances.astype(np.float64).copy()
    np.fill_diagonal(apart, np.inf)
    while len(members) > 2:
        first, second = divmod(int(np.argmin(apart)), len(members))
        first, second = min(first, second), max(first, second)
        a, b = len(members[first]), len(members[second])
        merged = (a * apart[first] + b * apart[second]) / (a + b)
        apart[first], apart[:, first] = merged, merged
        apart[first, first] = np.inf
        apart = np.delete(np.delete(apart, second, axis=0), second, axis=1)
        members[first] += members.pop(second)
    larger = members[1] if len(members[1]) > len(members[0]) else members[0]
    return np.isin(np.arange(count), larger)

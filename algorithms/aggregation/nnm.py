"""NNM, nearest-neighbour mixing: every message becomes the mean of the S - f messages that are nearest to it.

Allouah et al., AISTATS 2023, arXiv:2302.01772. A row is its own nearest neighbour; of rows that are equally far, the
first one counts as nearer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from .contract import Before
from .messages import Messages


@dataclass(frozen=True, kw_only=True)
class Nnm(Before):
    """f: the number of Byzantine messages to tolerate, by default the rule's."""

    f: int | None = None

    pairwise: ClassVar[bool] = True
    called: ClassVar[str] = "nearest-neighbour mixing"
    condition: ClassVar[str] = "f < S"
    takes_weights: ClassVar[bool] = False
    mixes: ClassVar[bool] = True

    def fewest(self, f: int) -> int:
        return f + 1

    def apply(self, x: Messages) -> Messages:
        distances2 = x.distances2
        np.fill_diagonal(distances2, -1.0)
        keep = x.count - x.f
        nearest = np.argsort(distances2, axis=1, kind="stable")[:, :keep]
        matrix = np.zeros((x.count, x.count))
        np.put_along_axis(matrix, nearest, 1.0 / keep, axis=1)
        return x.combine(matrix)

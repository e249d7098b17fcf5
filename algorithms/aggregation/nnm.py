"""NNM, nearest-neighbour mixing: every message becomes the mean of the S - f messages that are nearest to it.

Allouah et al., AISTATS 2023, arXiv:2302.01772. A row is its own nearest neighbour; of rows that are equally far, the
first one counts as nearer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from .contract import Before, Reads, Rows


@dataclass(frozen=True, kw_only=True)
class Nnm(Before):
    """f: the number of Byzantine messages to tolerate, by default the rule's."""

    f: int | None = None

    reads: ClassVar[tuple[Reads, ...]] = ("gram",)
    called: ClassVar[str] = "nearest-neighbour mixing"
    condition: ClassVar[str] = "f < S"
    takes_weights: ClassVar[bool] = False
    mixes: ClassVar[bool] = True

    def fewest(self, f: int) -> int:
        return f + 1

    def faults(self, f: int) -> int:
        return f if self.f is None else self.f

    def matrix(self, rows: Rows) -> np.ndarray:
        distances2 = rows.distances2
        np.fill_diagonal(distances2, -1.0)
        keep = rows.count - rows.f
        nearest = np.argsort(distances2, axis=1, kind="stable")[:, :keep]
        matrix = np.zeros((rows.count, rows.count))
        np.put_along_axis(matrix, nearest, 1.0 / keep, axis=1)
        return matrix

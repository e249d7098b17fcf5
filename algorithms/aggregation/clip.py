"""Clipping before a rule: every message is shortened to a norm of at most c."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from .contract import Before, Reads, Rows
from .norm_clipping import check_bound, factors


@dataclass(frozen=True, kw_only=True)
class ClipRows(Before):
    """c: the largest norm, or c_relative: the same in units of the median norm (default 1)."""

    c: float | None = None
    c_relative: float | None = None

    reads: ClassVar[tuple[Reads, ...]] = ("norms",)
    called: ClassVar[str] = "clipping"
    scales: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_bound(self.c, self.c_relative)

    def matrix(self, rows: Rows) -> np.ndarray:
        return np.diag(factors(rows.norms, self.c, self.c_relative))

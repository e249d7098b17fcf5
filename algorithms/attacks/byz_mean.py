"""ByzMean: half of the Byzantine clients send a poor mean e, the others what makes e the mean of all messages.

Xu et al., ICDCS 2022, arXiv:2109.05872, with e = mean - 0.5 deviation (a hybrid with ALIE). With m = floor(B / 2) rows
e, the others are (S e - sum of honest rows - m e) / (B - m). (The published code divides so that e is missed.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from .contract import CohortAttack, Columns


@dataclass(frozen=True, kw_only=True)
class ByzMean(CohortAttack):
    """The mean of all messages becomes e."""

    called: ClassVar[str] = "byz_mean"

    def forge(self, x: Columns) -> np.ndarray:
        e, first, others = x.mean - 0.5 * x.deviation, x.byzantine // 2, x.byzantine - x.byzantine // 2
        rest = ((len(x.rows) + x.byzantine) * e - x.rows.sum(axis=0) - first * e) / others
        return np.stack([e] * first + [rest] * others)

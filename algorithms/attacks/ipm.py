"""IPM, inner-product manipulation: -epsilon times the mean of the honest messages.

Xie, Koyejo, Gupta, UAI 2020, arXiv:1903.03936. With B of S messages Byzantine and h honest ones, the plain mean turns
round when epsilon B > h.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from .contract import CohortAttack, Columns


@dataclass(frozen=True, kw_only=True)
class Ipm(CohortAttack):
    """epsilon: the factor; 0.1 and 100 are usual."""

    epsilon: float = 0.1
    called: ClassVar[str] = "ipm"

    def forge(self, x: Columns) -> np.ndarray:
        return -self.epsilon * x.mean

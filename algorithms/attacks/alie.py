"""ALIE, a little is enough: the mean of the honest messages, moved by z standard deviations in every coordinate.

Baruch, Baruch, Goldberg, NeurIPS 2019, arXiv:1902.06156. With z = "max" the Byzantine rows need so few honest ones
beyond them that, on average, they pass for the majority:

    s = floor(S/2 + 1) - B;  p = (S - B - s) / (S - B), at most 1 - 1 / (S - B);  z = max(0, Phi^-1(p))
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist
from typing import ClassVar, Literal

import numpy as np
from torch import Tensor

from .contract import CohortAttack, Columns, Plan, Seen


@dataclass(frozen=True, kw_only=True)
class Alie(CohortAttack):
    """z: standard deviations, or "max". sign: the direction, - or +. negated: the deviation is negated on the first
    half of the coordinates."""

    z: float | Literal["max"] = 1.5
    sign: Literal["-", "+"] = "-"
    negated: bool = False
    called: ClassVar[str] = "alie"

    def plan(self, seen: Seen, state: tuple[Tensor, ...]) -> Plan:
        z = z_max(seen.total, seen.byzantine) if self.z == "max" else float(self.z)
        return Plan((z if self.sign == "+" else -z,), columns={"z": z})

    def forge(self, x: Columns) -> np.ndarray:
        (z,) = x.numbers
        return x.mean + z * (half_negated(x) if self.negated else x.deviation)


def z_max(rows: int, byzantine: int) -> float:
    """The largest z with which B of S rows pass for the majority."""
    honest = rows - byzantine
    supporters = rows // 2 + 1 - byzantine
    p = min((honest - supporters) / honest, 1 - 1 / honest)
    return max(0.0, NormalDist().inv_cdf(p)) if p > 0 else 0.0


def half_negated(x: Columns) -> np.ndarray:
    """(C,) the deviation, negated on the first half of the coordinates."""
    return np.where(np.arange(x.begin, x.end) < x.length // 2, -x.deviation, x.deviation)

"""ARC, adaptive robust clipping: messages are shortened to the norm of one of the longest.

Allouah et al., 2024, arXiv:2405.14432. With k = floor(2 f (S - f) / S) the bound is the (k + 1)-th largest norm.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from .contract import Before
from .messages import Messages
from .norm_clipping import factors


@dataclass(frozen=True, kw_only=True)
class Arc(Before):
    """f: the number of Byzantine messages to tolerate, by default the rule's."""

    f: int | None = None

    called: ClassVar[str] = "ARC"
    condition: ClassVar[str] = "2 f < S"

    def fewest(self, f: int) -> int:
        return 2 * f + 1

    def apply(self, x: Messages) -> Messages:
        k = 2 * x.f * (x.count - x.f) // x.count
        return x.scale(factors(x.norms, float(np.sort(x.norms)[::-1][k]), None))

"""Noise with as many positive, zero and negative coordinates as the mean has, so that counts of signs do not show it.

The magnitudes are uniform in [0, 1), and the places are shuffled.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Literal

import numpy as np
from torch import Tensor

from ...workloads import counted
from .contract import CohortAttack, Columns, Plan, Seen


@dataclass(frozen=True, kw_only=True)
class SignGuardNoise(CohortAttack):
    """match: "norm": the message has the median norm of the known messages."""

    match: Literal["norm"] | None = None

    called: ClassVar[str] = "signguard_noise"

    def plan(self, seen: Seen, state: tuple[Tensor, ...]) -> Plan:
        """The factor of the noise, and the numbers of positive and of negative coordinates."""
        positive, _, negative = (int(count) for count in seen.signs_of_mean())
        factor = 1.0
        if self.match == "norm":
            values = shuffled(int(seen.key), seen.length, positive, negative)
            size = float(np.sqrt(np.square(values).sum()))
            factor = float(np.median(np.sqrt(seen.norms2))) / size if size > 0 else 1.0
        return Plan((factor, positive, negative))

    def forge(self, x: Columns) -> np.ndarray:
        factor, positive, negative = x.numbers
        return factor * shuffled(int(x.key), x.length, int(positive), int(negative))[x.begin : x.end]


@lru_cache(2)
def shuffled(key: int, length: int, positive: int, negative: int) -> np.ndarray:
    """(P,): magnitudes with so many positive and negative signs, the rest 0, in a random order."""
    signs = np.zeros(length)
    signs[:positive], signs[positive : positive + negative] = 1.0, -1.0
    generator = counted.numpy_generator(key, "places")
    return (signs * generator.random(length))[generator.permutation(length)]

"""Min-max and min-sum: as far from the mean as a message can be without standing out among the honest ones.

Shejwalkar, Houmansadr, NDSS 2021. The message is mean - gamma p with the largest gamma such that

    min-max:  max_i |message - x_i|^2 <= M, the largest squared distance of two honest rows
    min-sum:  sum_i |message - x_i|^2 <= the largest (or the least) such sum of an honest row

Both have closed forms, with a_i = |x_i - mean|^2 and b_i = <p, mean - x_i>:

    min-max:  gamma = min_i (b_i + sqrt(b_i^2 + |p|^2 (M - a_i))) / |p|^2
    min-sum:  gamma = sqrt(max_i a_i) / |p|, or sqrt(min_i a_i) / |p| for the least sum
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from torch import Tensor

from ..aggregation.messages import distances2, product
from .alie import half_negated
from .contract import CohortAttack, Columns, Plan, Seen

Along = Literal["std", "unit", "sign"]


@dataclass(frozen=True, kw_only=True)
class MinMax(CohortAttack):
    """p: the direction: the standard deviation, the mean at length 1, or the sign of the mean. negated: it is negated
    on the first half of the coordinates, with p = "std"."""

    p: Along = "std"
    negated: bool = False

    pairwise: ClassVar[bool] = True
    directs: ClassVar[bool] = True
    called: ClassVar[str] = "min_max"

    def direction(self, x: Columns) -> np.ndarray:
        """p up to its length."""
        if self.p == "std":
            return half_negated(x) if self.negated else x.deviation
        return x.mean if self.p == "unit" else np.sign(x.mean)

    def plan(self, seen: Seen, state: tuple[Tensor, ...]) -> Plan:
        """The number is gamma in units of the direction's length, so that p need not be scaled."""
        gamma = self.gamma(seen)
        length = np.sqrt(max(0.0, seen.gram(extra=True)[-1, -1])) if self.p == "unit" else 1.0
        return Plan((gamma,), columns={"gamma": gamma * float(length)})

    def gamma(self, seen: Seen) -> float:
        """The largest gamma, for the direction as it is."""
        squared = seen.gram(extra=True)[-1, -1]
        if squared <= 0:
            return 0.0
        a, b = from_mean(seen)
        largest = distances2(seen.gram()).max()
        return float(((b + np.sqrt(np.maximum(0.0, b * b + squared * (largest - a)))) / squared).min())

    def forge(self, x: Columns) -> np.ndarray:
        (gamma,) = x.numbers
        return x.mean - gamma * self.direction(x)


@dataclass(frozen=True, kw_only=True)
class MinSum(MinMax):
    """bound: the largest sum of squared distances of an honest row ("max"), or the least one ("min")."""

    bound: Literal["max", "min"] = "max"
    called: ClassVar[str] = "min_sum"

    def gamma(self, seen: Seen) -> float:
        squared = seen.gram(extra=True)[-1, -1]
        if squared <= 0:
            return 0.0
        a, _ = from_mean(seen)
        return float(np.sqrt((a.max() if self.bound == "max" else a.min()) / squared))


def from_mean(seen: Seen) -> tuple[np.ndarray, np.ndarray]:
    """((h,) |x_i - mean|^2, (h,) <p, mean - x_i>), where p is the last row of the Gram matrix."""
    gram = seen.gram(extra=True)
    products = product(gram, seen.mean)
    squared = float(product(seen.mean, products))
    own = np.diagonal(gram)[: seen.count]
    a = np.maximum(0.0, own - 2 * products[: seen.count] + squared)
    return a, products[-1] - gram[-1, : seen.count]

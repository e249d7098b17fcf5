"""Centred clipping: steps from the vector of the round before towards the messages, none of them longer than tau.

Karimireddy, He, Jaggi, ICML 2021, arXiv:2012.10333.

    v <- v + (1/S) sum of (x_i - v) min(1, tau / |x_i - v|),  `iterations` times

v begins at what the rule gave in the round before, at 0 in round 1. It is a combination of the rows all the time, so
that only inner products are needed. A Byzantine message moves v by at most tau / S in each iteration.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from .contract import Aggregator
from .messages import Answer, Messages, distances_from, shortening


@dataclass(frozen=True, kw_only=True)
class CentredClipping(Aggregator):
    """tau: the longest step, or tau_relative: the same in units of the median of |x_i - v| at the beginning (default
    1)."""

    tau: float | None = None
    tau_relative: float | None = None
    iterations: int = 1

    pairwise: ClassVar[bool] = True
    extra: ClassVar[Literal["", "last", "trusted"]] = "last"
    called: ClassVar[str] = "centred clipping"
    takes_weights: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.tau is not None and self.tau_relative is not None:
            raise ValueError(f"give tau or tau_relative, got tau={self.tau}, tau_relative={self.tau_relative}")
        given = self.tau if self.tau is not None else self.tau_relative
        if given is not None and not given > 0:
            raise ValueError(f"tau > 0 must hold, got {given}; give a bound on the length of a step")
        if self.iterations < 1:
            raise ValueError(f"iterations >= 1 must hold, got iterations={self.iterations}")

    def aggregate(self, x: Messages) -> Answer:
        gram, weights = x.gram(extra=True), np.zeros(x.count + 1)
        weights[-1] = 1.0
        tau = self.tau
        for _ in range(self.iterations):
            away = distances_from(weights, gram)[:-1]
            if tau is None:
                tau = (self.tau_relative or 1.0) * float(np.median(away))
            s = shortening(away, tau)
            weights = (1 - s.sum() / x.count) * weights + np.append(s, 0.0) / x.count
        return x.sum(weights)

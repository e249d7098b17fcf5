"""Attacks with the factor that harms the run's own rule most, found by a line search.

Allouah et al. 2023; the search is ByzFL's. It maximises J(t) = |F(honest rows, B copies of a(t)) - mean|, where F is
the rule with what stands before it, and a(t) = -t mean (IPM) or mean + sign t deviation (ALIE):

    best = start, step = delta; while best + step is better: take it, step <- 2 step; else step <- ratio step, go on to:
    try best + step, take it if it is better, step <- ratio step; until `evals` evaluations are made
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from torch import Tensor

from .contract import CohortAttack, Columns, Plan, Seen


@dataclass(frozen=True, kw_only=True)
class OptimalIpm(CohortAttack):
    """evals: evaluations of the rule. start, delta, ratio: of the search."""

    evals: int = 20
    start: float = 0.0
    delta: float = 10.0
    ratio: float = 0.8

    pairwise: ClassVar[bool] = True
    directs: ClassVar[bool] = True
    searches: ClassVar[bool] = True
    called: ClassVar[str] = "optimal_ipm"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.evals >= 1 and self.delta > 0 and 0 < self.ratio < 1):
            raise ValueError(
                "evals >= 1, delta > 0 and 0 < ratio < 1 must hold, got "
                f"evals={self.evals}, delta={self.delta}, ratio={self.ratio}"
            )

    def direction(self, x: Columns) -> np.ndarray:
        return x.mean

    def sent(self, seen: Seen, t: float) -> np.ndarray:
        """The weights of a(t) among the rows of the Gram matrix."""
        return -t * seen.mean

    def plan(self, seen: Seen, state: tuple[Tensor, ...]) -> Plan:
        assert seen.error is not None
        error = seen.error
        t, most = search(
            lambda t: error(self.sent(seen, t)), self.evals, start=self.start, delta=self.delta, ratio=self.ratio
        )
        return Plan((t,), columns={"factor": t, "error": most})

    def forge(self, x: Columns) -> np.ndarray:
        (t,) = x.numbers
        return -t * x.mean


@dataclass(frozen=True, kw_only=True)
class OptimalAlie(OptimalIpm):
    """sign: the direction, - or +."""

    sign: Literal["-", "+"] = "-"
    called: ClassVar[str] = "optimal_alie"

    def direction(self, x: Columns) -> np.ndarray:
        return x.deviation

    def sent(self, seen: Seen, t: float) -> np.ndarray:
        weights = seen.mean
        weights[-1] = t if self.sign == "+" else -t
        return weights

    def forge(self, x: Columns) -> np.ndarray:
        (t,) = x.numbers
        return x.mean + (t if self.sign == "+" else -t) * x.deviation


def search(
    value: Callable[[float], float], evals: int, start: float, delta: float, ratio: float
) -> tuple[float, float]:
    """(argument, value) of the best of `evals` evaluations, that of `start` counted."""
    best, most, step, left = start, value(start), delta, evals - 1
    while left > 0:
        found, left = value(best + step), left - 1
        if not found > most:
            step *= ratio
            break
        best, most, step = best + step, found, 2 * step
    while left > 0:
        found, left = value(best + step), left - 1
        if found > most:
            best, most = best + step, found
        step *= ratio
    return best, most

"""Krum and Multi-Krum: the messages that are closest to others.

Blanchard et al., NeurIPS 2017, arXiv:1703.02757.

    score_i = sum of the q least |x_i - x_j|^2 over j != i
    Krum: the row of least score.  Multi-Krum: the mean of the `keep` rows of least score.

q is S - f - 1 by default, the form whose robustness coefficient is known and which needs 2 f < S; the paper has
q = S - f - 2 with 2 f + 2 < S. Distances are squared. Of rows with the same score the first one counts as less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np

from .contract import Aggregator, Before, Faults, in_proportion
from .messages import Answer, Messages, merged

Neighbours = Literal["n-f-1", "n-f-2"]


def neighbour_count(neighbours: Neighbours, rows: int, f: int) -> int:
    """q, the number of neighbours that a score counts; at least 1."""
    return max(1, rows - f - int(neighbours[-1]))


def scores(distances2: np.ndarray, q: int, errors: np.ndarray | None = None) -> np.ndarray:
    """(S,): for each row the sum of its q least squared distances to other rows, added in ascending order. errors: (S,
    S), bounds of the rounding errors of the distances, or None. Scores that differ by less are equal."""
    others = ~np.eye(len(distances2), dtype=bool)
    apart = distances2[others].reshape(len(distances2), -1)
    if errors is None:
        return np.sort(apart, axis=1)[:, :q].sum(axis=1)
    nearest = np.argsort(apart, axis=1, kind="stable")[:, :q]
    counted = (
        np.take_along_axis(each, nearest, 1).sum(axis=1) for each in (apart, errors[others].reshape(apart.shape))
    )
    return merged(*counted)


def after(before: Sequence[Before], rows: int) -> int:
    """The number of rows that pre-aggregations make of `rows` rows."""
    for part in before:
        rows = part.count(rows)
    return rows


@dataclass(frozen=True, kw_only=True)
class Krum(Aggregator):
    """The message that is closest to its neighbours. f: the number of Byzantine messages to tolerate. neighbours:
    "n-f-1" or "n-f-2"."""

    f: Faults
    neighbours: Neighbours = "n-f-1"

    pairwise: ClassVar[bool] = True
    called: ClassVar[str] = "Krum"
    takes_weights: ClassVar[bool] = False

    @property
    def condition(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return "2 f < S" if self.neighbours == "n-f-1" else "2 f + 2 < S"

    def fewest(self, f: int) -> int:
        return 2 * f + (1 if self.neighbours == "n-f-1" else 3)

    def best(self, x: Messages, keep: int) -> np.ndarray:
        """The positions of the `keep` messages of least score, in ascending order."""
        if x.count == 1:
            return np.zeros(1, dtype=np.int64)
        q = neighbour_count(self.neighbours, x.count, x.f)
        found = scores(x.distances2, q, x.distance_errors)
        return np.sort(np.argsort(found, kind="stable")[:keep])

    def aggregate(self, x: Messages) -> Answer:
        return x.sum(np.eye(x.count)[self.best(x, 1)[0]])


@dataclass(frozen=True, kw_only=True)
class MultiKrum(Krum):
    """The mean of the messages that are closest to their neighbours. keep: their number in a cohort, by default
    S - f."""

    keep: int | None = None

    called: ClassVar[str] = "Multi-Krum"
    takes_weights: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.keep is not None and self.keep < 1:
            raise ValueError(f"keep >= 1 must hold, got keep={self.keep}")

    def scaled(self, drawn: int, cohort: int) -> Aggregator:
        """As many messages are left out as `keep` leaves out of a cohort, in proportion and rounded up, as f is."""
        rule = super().scaled(drawn, cohort)
        if drawn == cohort or self.keep is None:
            return rule
        meant, there = (after(self.before, count) for count in (cohort, drawn))
        keep = there - in_proportion(meant - self.keep, drawn, cohort)
        return replace(rule, **{"keep": max(1, keep)})

    def refuses(self, rows: int, f: int) -> str:
        if self.keep is None or self.keep <= rows:
            return ""
        return f"Multi-Krum needs keep <= S, got keep={self.keep} with S={rows}; lower aggregate.keep"

    def is_mean(self, rows: int, f: int) -> bool:
        return (rows - f if self.keep is None else self.keep) == rows

    def aggregate(self, x: Messages) -> Answer:
        return x.average(self.best(x, x.count - x.f if self.keep is None else self.keep))

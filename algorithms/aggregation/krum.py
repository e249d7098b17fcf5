"""Krum and Multi-Krum: the messages that are closest to others.

Blanchard et al., NeurIPS 2017, arXiv:1703.02757.

    score_i = sum of the q least |x_i - x_j|^2 over j != i
    Krum: the row of least score.  Multi-Krum: the mean of the `keep` rows of least score.

q is S - f - 1 by default, the form whose robustness coefficient is known and which needs 2 f < S; the paper has
q = S - f - 2 with 2 f + 2 < S. Distances are squared. Of rows with the same score the first one counts as less.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from .contract import Aggregator, Decision, Faults, Reads, Rows

Neighbours = Literal["n-f-1", "n-f-2"]


def neighbour_count(neighbours: Neighbours, rows: int, f: int) -> int:
    """q, the number of neighbours that a score counts; at least 1."""
    return max(1, rows - f - int(neighbours[-1]))


def scores(distances2: np.ndarray, q: int) -> np.ndarray:
    """(S,): for each row the sum of its q least squared distances to other rows, added in ascending order."""
    count = len(distances2)
    others = distances2[~np.eye(count, dtype=bool)].reshape(count, count - 1)
    return np.sort(others, axis=1)[:, :q].sum(axis=1)


@dataclass(frozen=True, kw_only=True)
class Krum(Aggregator):
    """The message that is closest to its neighbours. f: the number of Byzantine messages to tolerate. neighbours:
    "n-f-1" or "n-f-2"."""

    f: Faults
    neighbours: Neighbours = "n-f-1"

    reads: ClassVar[tuple[Reads, ...]] = ("gram",)
    called: ClassVar[str] = "Krum"
    takes_weights: ClassVar[bool] = False

    @property
    def condition(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return "2 f < S" if self.neighbours == "n-f-1" else "2 f + 2 < S"

    def fewest(self, f: int) -> int:
        return 2 * f + (1 if self.neighbours == "n-f-1" else 3)

    def best(self, rows: Rows, keep: int) -> np.ndarray:
        """The positions of the `keep` rows of least score, in ascending order."""
        if rows.count == 1:
            return np.zeros(1, dtype=np.int64)
        found = scores(rows.distances2, neighbour_count(self.neighbours, rows.count, rows.f))
        return np.sort(np.argsort(found, kind="stable")[:keep])

    def decide(self, rows: Rows, state: Any) -> Decision:
        weights = np.zeros(rows.count)
        weights[self.best(rows, 1)] = 1.0
        return Decision(weights)


@dataclass(frozen=True, kw_only=True)
class MultiKrum(Krum):
    """The mean of the messages that are closest to their neighbours. keep: their number, by default S - f."""

    keep: int | None = None

    called: ClassVar[str] = "Multi-Krum"
    takes_weights: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.keep is not None and self.keep < 1:
            raise ValueError(f"keep >= 1 must hold, got keep={self.keep}")

    def refuses(self, rows: int, f: int) -> str:
        if self.keep is None or self.keep <= rows:
            return ""
        return f"Multi-Krum needs keep <= S, got keep={self.keep} with S={rows}; lower aggregate.keep"

    def is_mean(self, rows: int, f: int) -> bool:
        return (rows - f if self.keep is None else self.keep) == rows

    def decide(self, rows: Rows, state: Any) -> Decision:
        kept = self.best(rows, rows.count - rows.f if self.keep is None else self.keep)
        weights = np.zeros(rows.count)
        weights[kept] = rows.weights[kept] / rows.weights[kept].sum()
        return Decision(weights)

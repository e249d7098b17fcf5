"""Bulyan: messages that Krum selects one after another, then the mean around the median of each coordinate.

El Mhamdi, Guerraoui, Rouault, ICML 2018, arXiv:1802.07927.

    theta = S - 2 f times: move Krum's choice among the rows that are left to the selected ones
    answer: in each coordinate the mean of the theta - 2 f selected values that are nearest to their median

Near the end Krum counts one neighbour, and the two rows of the nearest pair always tie: the answer depends on the order
of the rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from .contract import Aggregator, Faults
from .krum import Neighbours, neighbour_count, scores
from .meamed import mean_around_median
from .messages import Answer, Messages


@dataclass(frozen=True, kw_only=True)
class Bulyan(Aggregator):
    """f: the number of Byzantine messages to tolerate. neighbours: of Krum's scores."""

    f: Faults
    neighbours: Neighbours = "n-f-2"

    by: ClassVar[Literal["weights", "columns"]] = "columns"
    pairwise: ClassVar[bool] = True
    called: ClassVar[str] = "Bulyan"
    condition: ClassVar[str] = "S >= 4 f + 3"
    takes_weights: ClassVar[bool] = False

    def fewest(self, f: int) -> int:
        return 4 * f + 3

    def aggregate(self, x: Messages) -> Answer:
        left, selected = list(range(x.count)), list[int]()
        distances2, errors = x.distances2, x.distance_errors
        for _ in range(x.count - 2 * x.f):
            among, q = np.ix_(left, left), neighbour_count(self.neighbours, len(left), x.f)
            found = scores(distances2[among], q, None if errors is None else errors[among])
            selected.append(left.pop(int(np.argmin(found))))
        return x.combine(np.eye(x.count)[selected]).by_coordinate()

    def columns(self, x: np.ndarray, f: int) -> np.ndarray:
        return mean_around_median(x, 2 * f)

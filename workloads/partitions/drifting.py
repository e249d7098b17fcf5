"""A partition whose clients train on a window of their rows that moves from round to round: drift.

The rows of a client in round t follow from t and the client alone, so that a run that is resumed, forked, asynchronous
or on other workers has the same ones; in an asynchronous run t is that of the model that the client begins with. A
window has the same number of rows in all rounds. Sorted by label, the rows make the labels of a client drift; in the
order of a file that is sorted by time, they are a stream. Jothimurugesan et al. 2023 (FedDrift), arXiv:2206.00799, have
drifts that reach the clients at different times, as `start: random` does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from .. import counted
from ..client_index import ClientIndex, Drift
from ..workload import Partition
from .standard import Dirichlet


@dataclass(frozen=True)
class Drifting(Partition):
    """`of`: the partition that says which rows each client has. `window`: the share of its rows that it trains on in a
    round. `move`: by which share of its rows the window moves on in a round; behind the last row it goes on with the
    first one, so that it has passed over all rows after 1 / move rounds. `order`: a client's rows are sorted by what
    `of` reads, the label or a column (value), in the order of the data set (given), or in random order. `start`: the
    window of round 1 begins with the first row (first), or with a row drawn for each client (random)."""

    of: Partition = Dirichlet()
    window: float = 0.3
    move: float = 0.02
    order: Literal["value", "given", "random"] = "value"
    start: Literal["first", "random"] = "random"

    def __post_init__(self) -> None:
        if not 0 < self.window <= 1:
            raise ValueError(f"0 < window <= 1 must hold, got window={self.window}")
        if not 0 <= self.move <= 1:
            raise ValueError(f"0 <= move <= 1 must hold, got move={self.move}")
        if self.order not in ("value", "given", "random"):
            raise ValueError(f"order must be value, given or random, got order={self.order!r}")
        if self.start not in ("first", "random"):
            raise ValueError(f"start must be first or random, got start={self.start!r}")

    @property
    def column(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.of.column

    def deal(self, labels: np.ndarray, clients: int, seed: int) -> ClientIndex:
        if self.order == "value" and labels.ndim != 1:
            raise ValueError(
                f"order=value needs one {self.column} a row, got the shape {labels.shape}; choose given or random"
            )
        dealt = self.of.deal(labels, clients, seed)
        owner, rows = np.repeat(np.arange(clients), dealt.sizes), dealt.rows
        if self.order != "random":
            by = labels[rows] if self.order == "value" else rows
            rows = rows[np.lexsort((by, owner))]  # stable: equal values stay in random order
        if self.start == "random":
            first = counted.numpy_generator(seed, "partition", "drifting").random(clients) * dealt.sizes
            within = np.arange(len(rows)) - np.repeat(dealt.offsets[:-1] - first.astype(np.int64), dealt.sizes)
            rows = rows[np.repeat(dealt.offsets[:-1], dealt.sizes) + within % np.repeat(dealt.sizes, dealt.sizes)]
        return dealt._replace(rows=rows, drift=Drift(self.window, self.move))

"""Partitions that a set's own clients make: writers, roles, users, whatever its column "client" names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from . import counted
from .base import ClientIndex, Partition
from .partitions import dealt


@dataclass(frozen=True)
class Natural(Partition):
    """Each client is one of the set's own, drawn at random where the set has more than are wanted.

    `minimum`: rows that one must have to count. `rest`: what becomes of those not drawn: "drop", as Takakura et al.
    2025 do (100 of 3,550 writers), or "merge", whole ones dealt over the clients, so that every row is used.
    """

    minimum: int = 1
    rest: Literal["drop", "merge"] = "drop"

    column: ClassVar[str] = "client"

    def __post_init__(self) -> None:
        if self.minimum < 1:
            raise ValueError(f"minimum >= 1 must hold, got minimum={self.minimum}")
        if self.rest not in ("drop", "merge"):
            raise ValueError(f"rest must be drop or merge, got rest={self.rest!r}")

    def deal(self, labels: np.ndarray, clients: int, seed: int) -> ClientIndex:
        """labels: (n,) whose each row is."""
        random = counted.numpy_generator(seed, "partition", "natural")
        order = np.argsort(labels, kind="stable")
        starts = np.unique(labels[order], return_index=True)[1][1:]
        owners = [rows for rows in np.split(order, starts) if len(rows) >= self.minimum]
        if not 1 <= clients <= len(owners):
            raise ValueError(
                f"1 <= clients <= the set's own clients of {self.minimum} rows or more must hold, got "
                f"clients={clients}, own={len(owners)}; lower federation.clients or choose another partition"
            )
        drawn = random.permutation(len(owners))
        drawn = drawn[:clients] if self.rest == "drop" else drawn
        hands = [[owners[owner] for owner in drawn[client::clients]] for client in range(clients)]
        return dealt([np.concatenate(hand) for hand in hands], random)

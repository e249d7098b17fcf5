"""Which nodes hold which rows of client states. This module knows nothing of Ray: tests drive it without.

A row has one number everywhere, and the files of each node have a place for every row (the files are sparse). So a row
that moves is copied to the same place in another node's file, and the driver's table, the workers and the checkpoints
know nothing of nodes. A row is on the node that wrote it, and on those that it was copied to since.
"""

from __future__ import annotations

import numpy as np

MOST_NODES = 256
DRIVER = 0
"""The driver's node, whose files are those of the run, which checkpoints name."""


class RowLocations:
    def __init__(self, rows: int) -> None:
        """Every row is on the driver's node until another node has written it."""
        self.copies = np.zeros((MOST_NODES, rows), dtype=bool)
        self.nodes = 0

    def grow(self, rows: int) -> None:
        """There are `rows` rows now."""
        more = np.zeros((MOST_NODES, rows - self.copies.shape[1]), dtype=bool)
        more[: self.nodes] = np.arange(self.nodes)[:, None] == DRIVER
        self.copies = np.concatenate([self.copies, more], axis=1)

    def add(self) -> int:
        """The number of a new node."""
        if self.nodes >= MOST_NODES:
            raise ValueError(f"at most {MOST_NODES} nodes can come and go in a run")
        self.nodes += 1
        self.copies[self.nodes - 1] = self.nodes - 1 == DRIVER
        return self.nodes - 1

    def held(self, rows: np.ndarray) -> np.ndarray:
        """(nodes,): how many of these rows each node has."""
        return self.copies[: self.nodes, rows].sum(1)

    def wrote(self, node: int, rows: np.ndarray) -> None:
        self.copies[: self.nodes, rows] = False
        self.copies[node, rows] = True

    def copied(self, node: int, rows: np.ndarray) -> None:
        self.copies[node, rows] = True

    def lose(self, node: int) -> None:
        self.copies[node] = False

    def gone(self, rows: np.ndarray) -> np.ndarray:
        """The rows among these that no node has."""
        return rows[~self.copies[: self.nodes, rows].any(0)]

    def missing(self, node: int, rows: np.ndarray) -> list[tuple[int, np.ndarray]]:
        """[(another node, rows that it has), …] for the rows among these that this node lacks."""
        rows = rows[~self.copies[node, rows]]
        source = self.copies[: self.nodes, rows].argmax(0)
        return [(int(other), rows[source == other]) for other in np.unique(source)]

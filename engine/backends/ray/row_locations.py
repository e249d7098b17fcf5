"""Which nodes hold which rows of client states. This module knows nothing of Ray: tests drive it without.

A row has one number everywhere, and the files of each node have a place for every row (the files are sparse). So a row
that moves is copied to the same place in another node's file, and the driver's table, the workers and the checkpoints
know nothing of nodes. A row is on the node that wrote it, and on those that it was copied to since.
"""

from __future__ import annotations

import numpy as np

DRIVER = 0
"""The driver's node, whose files are those of the run, which checkpoints name."""


class RowLocations:
    def __init__(self, rows: int) -> None:
        """Every row is on the driver's node until another node has written it."""
        self.copies = np.ones((1, rows), dtype=bool)  # (nodes, rows)

    @property
    def nodes(self) -> int:
        """How many nodes there have been."""
        return len(self.copies)

    def grow(self, rows: int) -> None:
        """There are `rows` rows now."""
        more = np.zeros((self.nodes, rows - self.copies.shape[1]), dtype=bool)
        more[DRIVER] = True
        self.copies = np.concatenate([self.copies, more], axis=1)

    def add(self) -> int:
        """The number of a new node."""
        self.copies = np.concatenate([self.copies, np.zeros_like(self.copies[:1])])
        return self.nodes - 1

    def held(self, rows: np.ndarray) -> np.ndarray:
        """(nodes,): how many of these rows each node has."""
        return self.copies[:, rows].sum(1)

    def wrote(self, node: int, rows: np.ndarray) -> None:
        self.copies[:, rows] = False
        self.copies[node, rows] = True

    def copied(self, node: int, rows: np.ndarray) -> None:
        self.copies[node, rows] = True

    def lose(self, node: int) -> None:
        self.copies[node] = False

    def gone(self, rows: np.ndarray) -> np.ndarray:
        """The rows among these that no node has."""
        return rows[~self.copies[:, rows].any(0)]

    def missing(self, node: int, rows: np.ndarray) -> list[tuple[int, np.ndarray]]:
        """[(another node, rows that it has), …] for the rows among these that this node lacks."""
        rows = rows[~self.copies[node, rows]]
        source = self.copies[:, rows].argmax(0)
        return [(int(other), rows[source == other]) for other in np.unique(source)]

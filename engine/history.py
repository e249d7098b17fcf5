"""The rounds so far, packed: as dicts they are a kilobyte a round, in columns a sixth of that."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator

import numpy as np


class History:
    """Rows of numbers by name, in columns; iterates over dicts, each without the names that its round did not have."""

    def __init__(self, rows: Iterable[dict[str, float]] = ()) -> None:
        self.columns: dict[str, tuple[array[float], array[int]]] = {}  # values, and whether there is one
        self.length = 0
        for row in rows:
            self.append(row)

    def append(self, row: dict[str, float]) -> None:
        for name in row:
            if name not in self.columns:
                self.columns[name] = array("d", bytes(8 * self.length)), array("b", bytes(self.length))
        for name, (values, there) in self.columns.items():
            values.append(row.get(name, 0.0))
            there.append(name in row)
        self.length += 1

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[dict[str, float]]:
        for i in range(self.length):
            yield {name: values[i] for name, (values, there) in self.columns.items() if there[i]}

    def copy(self) -> History:
        other = History()
        other.columns = {name: (values[:], there[:]) for name, (values, there) in self.columns.items()}
        other.length = self.length
        return other

    def column(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """(values, whether they were measured), both (R,)."""
        values, there = self.columns[name]
        return np.array(values), np.array(there, dtype=bool)

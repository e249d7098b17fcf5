"""The rounds so far, packed: as dicts they are a kilobyte a round, in columns a sixth of that."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

Record = dict[str, float]
"""One round's numbers, by column name; see `records`."""
Event = Record | str | list[Record]
"""What a run tells as it goes: a round's record, a sentence for the log, or all rounds before the one resumed at."""


class Column(NamedTuple):
    values: np.ndarray  # (capacity,)
    there: np.ndarray  # (capacity,) bool: whether it was measured


class History(Sequence[Record]):
    """Rows of numbers by name, in columns; as a sequence, dicts, each without the names that its round did not have."""

    def __init__(self, rows: Iterable[Record] = (), capacity: int = 64) -> None:
        """capacity: rows to have room for; pages that nobody has written to cost nothing."""
        self.columns: dict[str, Column] = {}
        self.length, self.capacity = 0, capacity
        for row in rows:
            self.append(row)

    @staticmethod
    def of(names: Sequence[str], parts: Sequence[dict[str, np.ndarray]]) -> History:
        """From `packed` parts, in order."""
        values, there = (np.concatenate([part[kind] for part in parts], 1) for kind in Column._fields)
        history = History(capacity=values.shape[1])
        history.columns = {name: Column(*pair) for name, *pair in zip(names, values, there, strict=True)}
        history.length = values.shape[1]
        return history

    def packed(self, begin: int, end: int) -> dict[str, np.ndarray]:
        """Some rows as arrays: values and whether they are there, each (C, rows), in the order of the columns."""
        rows = slice(begin, min(end, self.length))
        return {kind: np.stack([getattr(c, kind)[rows] for c in self.columns.values()]) for kind in Column._fields}

    def frozen(self) -> History:
        """The rounds so far, in the same memory: not to be appended to."""
        other = History(capacity=self.capacity)
        other.columns, other.length = dict(self.columns), self.length
        return other

    def append(self, row: dict[str, float]) -> None:
        if self.length >= self.capacity:
            self._grow(max(2 * self.capacity, 64))
        for name, value in row.items():
            if name not in self.columns:
                self.columns[name] = Column(np.zeros(self.capacity), np.zeros(self.capacity, dtype=bool))
            values, there = self.columns[name]
            values[self.length], there[self.length] = value, True
        self.length += 1

    def _grow(self, capacity: int) -> None:
        for name, column in self.columns.items():
            self.columns[name] = Column(*(np.zeros(capacity, dtype=old.dtype) for old in column))
            for new, old in zip(self.columns[name], column, strict=True):
                new[: self.length] = old[: self.length]
        self.capacity = capacity

    def replace(self, row: dict[str, float]) -> None:
        """Append; a round that is told again, after a checkpoint, replaces what was told of it and those after it."""
        while self.length and self.columns["round"].values[self.length - 1] >= row["round"]:
            self.length -= 1
            for column in self.columns.values():
                column.there[self.length] = False
        self.append(row)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, at: Any) -> Any:
        """The round at a place, or a list of those in a slice."""
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(self.length))]
        i = range(self.length)[at]
        return {name: float(values[i]) for name, (values, there) in self.columns.items() if there[i]}

    def column(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """(values, whether they were measured), both (R,); zero where they were not."""
        values, there = (array[: self.length] for array in self.columns[name])
        return np.where(there, values, 0.0), there

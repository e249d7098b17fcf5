"""The records of all rounds so far, in columns: they take a sixth of the kilobyte that one dict per round takes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

Record = dict[str, float]
"""The numbers of one round by column name; `parquet.py` describes the columns."""
Event = Record | str | list[Record]
"""What a run reports while it goes on: a round's record, a line for the log, or, when it is resumed, the records of
all rounds before."""


UNTRAINED = "no client took part in any round, so nothing was learned from the clients' data"
"""What is said of a run whose clients took no local step."""


class Column(NamedTuple):
    values: np.ndarray  # (capacity,)
    there: np.ndarray  # (capacity,) bool: whether it was measured


class History(Sequence[Record]):
    """A sequence of records, stored in columns. A record has only the names that were measured in its round."""

    def __init__(self, rows: Iterable[Record] = (), capacity: int = 64) -> None:
        """`capacity`: the rows to allocate. Memory pages that were never written to cost nothing."""
        self.columns: dict[str, Column] = {}
        self.length: int = 0
        self.capacity: int = capacity
        for row in rows:
            self.append(row)

    @staticmethod
    def of(names: Sequence[str], parts: Sequence[dict[str, np.ndarray]]) -> History:
        """The history of `packed` parts in order."""
        values, measured = (np.concatenate([part[kind] for part in parts], 1) for kind in Column._fields)
        history = History(capacity=values.shape[1])
        history.columns = {name: Column(*pair) for name, *pair in zip(names, values, measured, strict=True)}
        history.length = values.shape[1]
        return history

    def packed(self, begin: int, end: int) -> dict[str, np.ndarray]:
        """Rows begin … end - 1 as the arrays `values` and `there`, each (columns, rows), as checkpoints store them."""
        rows = slice(begin, min(end, self.length))
        return {kind: np.stack([getattr(c, kind)[rows] for c in self.columns.values()]) for kind in Column._fields}

    def frozen(self) -> History:
        """The rounds so far, in the same memory. Nothing may be appended to the result."""
        other = History(capacity=self.capacity)
        other.columns, other.length = dict(self.columns), self.length
        return other

    def without_at_end(self, beginnings: tuple[str, ...]) -> History:
        """The same as `frozen`, without the columns of the last round whose names begin so."""
        other = self.frozen()
        for name, (values, there) in self.columns.items():
            if name.startswith(beginnings) and there[self.length - 1]:
                other.columns[name] = Column(values, there.copy())
                other.columns[name].there[self.length - 1] = False
        return other

    def append(self, row: dict[str, float]) -> None:
        if self.length >= self.capacity:
            self._grow(max(2 * self.capacity, 64))
        for name, value in row.items():
            if name not in self.columns:
                self.columns[name] = Column(np.zeros(self.capacity), np.zeros(self.capacity, dtype=bool))
            values, measured = self.columns[name]
            values[self.length], measured[self.length] = value, True
        self.length += 1

    def _grow(self, capacity: int) -> None:
        for name, column in self.columns.items():
            self.columns[name] = Column(*(np.zeros(capacity, dtype=old.dtype) for old in column))
            for new, old in zip(self.columns[name], column, strict=True):
                new[: self.length] = old[: self.length]
        self.capacity = capacity

    def replace(self, row: dict[str, float]) -> None:
        """Append a record. A round that is run again after a checkpoint replaces its record and all later ones."""
        while self.length and self.columns["round"].values[self.length - 1] >= row["round"]:
            self.length -= 1
            for column in self.columns.values():
                column.there[self.length] = False
        self.append(row)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, at: Any) -> Any:
        """The record at an index, or a list of the records in a slice."""
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(self.length))]
        i = range(self.length)[at]
        return {name: float(values[i]) for name, (values, measured) in self.columns.items() if measured[i]}

    def measured(self, name: str) -> list[tuple[int, float]]:
        """(round, value) of the records that have the column."""
        if name not in self.columns:
            return []
        values, there = self.column(name)
        rounds, _ = self.column("round")
        return [(int(number), value) for number, value in zip(rounds[there], values[there].tolist(), strict=True)]

    @property
    def untrained(self) -> bool:
        """Whether there are rounds, and no client has taken a local step in any of them."""
        return "client/steps" in self.columns and not self.column("client/steps")[0].any()

    def column(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """(values, whether they were measured), both (R,). Values that were not measured are 0."""
        values, measured = (array[: self.length] for array in self.columns[name])
        return np.where(measured, values, 0.0), measured

"""Which rows of the training set each client has."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np


class ClientIndex(NamedTuple):
    """Which rows of the training set each of the N clients has.

    `offsets`: (N + 1,) int64, ascending from 0. `rows`: (offsets[N],) int64, row numbers of the training columns.
    Client i has rows[offsets[i] : offsets[i + 1]]. No row belongs to two clients, and a row that belongs to none is not
    used. `held`: the index of the rows that each client has but does not train on, which are its own test set, or None.
    `validation`: the same of rows by which settings are chosen. The engine sets both; a partition leaves them out.
    """

    offsets: np.ndarray
    rows: np.ndarray
    held: ClientIndex | None = None
    validation: ClientIndex | None = None

    @staticmethod
    def of(clients: list[np.ndarray]) -> ClientIndex:
        """The index of a list with the row numbers of each client, (n_i,) integers."""
        sizes = [len(rows) for rows in clients]
        return ClientIndex(
            np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64), np.concatenate(clients).astype(np.int64)
        )

    @staticmethod
    def equal(rows: np.ndarray, clients: int) -> ClientIndex:
        """`rows`, (n,) integers, cut in their order into `clients` parts of equal size. Where n is not divisible, the
        first parts have one row more."""
        each, more = divmod(len(rows), clients)
        places = np.arange(clients + 1, dtype=np.int64)
        return ClientIndex(places * each + np.minimum(places, more), rows.astype(np.int64))

    @property
    def sizes(self) -> np.ndarray:
        """(N,) int64: the number of examples of every client."""
        return np.diff(self.offsets)

    def sizes_of(self, clients: np.ndarray) -> np.ndarray:
        """(c,) int64: the number of examples of the given clients, (c,) integers."""
        return self.offsets[clients + 1] - self.offsets[clients]


def check_index(index: Any, rows: int) -> None:
    """Raise ValueError unless `index` is a ClientIndex of a training set with this number of rows."""
    if not isinstance(index, ClientIndex):
        raise ValueError(
            f"a partition must return a ClientIndex, got {type(index).__name__}; return ClientIndex.of(rows "
            "of each client)"
        )
    for name, values in (("offsets", index.offsets), ("rows", index.rows)):
        if not isinstance(values, np.ndarray) or values.ndim != 1 or values.dtype.kind not in "iu":
            got = f"{values.dtype} of shape {values.shape}" if isinstance(values, np.ndarray) else type(values).__name__
            raise ValueError(f"{name} of a ClientIndex must be whole numbers of shape (n,), got {got}; convert them")
    offsets, dealt = index.offsets, index.rows
    if not len(offsets) or offsets[0] or offsets[-1] != len(dealt) or (offsets[1:] < offsets[:-1]).any():
        raise ValueError(
            f"offsets of a ClientIndex must ascend from 0 to the number of its rows, {len(dealt)}, got "
            f"{np.array2string(offsets, threshold=8)}; ClientIndex.of makes them"
        )
    wrong = dealt[(dealt < 0) | (dealt >= rows)]
    if len(wrong):
        raise ValueError(
            f"0 <= row < {rows} must hold, the number of training rows, for the rows of a ClientIndex, got {wrong[0]}; "
            "give row numbers of the training set"
        )
    seen = np.zeros(rows, dtype=bool)
    seen[dealt] = True
    if np.count_nonzero(seen) < len(dealt):
        check_owners(index)


def check_owners(index: ClientIndex) -> None:
    """Raise ValueError if a row belongs to two clients. Some row is there twice."""
    dealt = index.rows.astype(np.int64)
    again = np.bincount(dealt)[dealt] > 1
    row, owner = dealt[again], np.repeat(np.arange(len(index.sizes)), index.sizes)[again]
    order = np.lexsort((owner, row))
    row, owner = row[order], owner[order]
    shared = np.flatnonzero((row[1:] == row[:-1]) & (owner[1:] != owner[:-1]))
    if len(shared):
        at = shared[0]
        raise ValueError(
            f"no row may belong to two clients, got row {row[at]} of the clients {owner[at]} and {owner[at + 1]}; give "
            "it to one of them"
        )

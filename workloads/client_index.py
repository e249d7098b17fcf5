"""Which rows of the training set each client has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np


class Drift(NamedTuple):
    """Says that a client trains on a window of its rows, which moves from round to round.

    `window`: the share of a client's rows that are in it, at least one row. `move`: by which share of its rows it moves
    on in a round; behind the last row it goes on with the first one. `whole`: the index of all rows, which the engine
    sets where the index itself has the windows of round 1.
    """

    window: float
    move: float
    whole: ClientIndex | None = None


class ClientIndex(NamedTuple):
    """Which rows of the training set each of the N clients has.

    `offsets`: (N + 1,) int64, ascending from 0. `rows`: (offsets[N],) int64, row numbers of the training columns.
    Client i has rows[offsets[i] : offsets[i + 1]]. No row belongs to two clients, and a row that belongs to none is not
    used. `held`: the index of the rows that each client has but does not train on, which are its own test set, or None.
    `validation`: the same of rows by which settings are chosen. The engine sets both; a partition leaves them out.
    `drift`: how the rows that a client trains on change from round to round; None if they do not. `unseen`: the index
    of further clients, with the numbers N, N + 1, …, which are evaluated and never trained with; the engine sets it.
    `targets`: (N,) how many targets the rows of each client have, such as the tokens of its texts; the engine sets it
    where the workload says how many a row has. `common`: what all rows of a client have in common: name of a training
    column -> (N,) its value in the rows of each client. A column is in it only if every client has one value of it.
    """

    offsets: np.ndarray
    rows: np.ndarray
    held: ClientIndex | None = None
    validation: ClientIndex | None = None
    drift: Drift | None = None
    unseen: ClientIndex | None = None
    targets: np.ndarray | None = None
    common: Mapping[str, np.ndarray] = {}

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

    def sizes_of(self, clients: np.ndarray | int) -> np.ndarray:
        """(c,) int64: the number of examples of the given clients, (c,) integers; () of one."""
        return self.offsets[clients + 1] - self.offsets[clients]

    def of_clients(self, clients: np.ndarray) -> ClientIndex:
        """The index of these clients (c,), which get the numbers 0, 1, …, with all of their rows."""
        sizes = self.sizes_of(clients)
        offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        places = np.arange(offsets[-1]) + np.repeat(self.offsets[clients] - offsets[:-1], sizes)
        held, validation = (None if it is None else it.of_clients(clients) for it in (self.held, self.validation))
        common = {name: values[clients] for name, values in self.common.items()}
        return ClientIndex(offsets, self.rows[places], held, validation, self.drift, common=common)

    @property
    def everyone(self) -> ClientIndex:
        """The index of all clients, those that are never trained with last."""
        return self if self.unseen is None else self._replace(unseen=None, drift=None).and_then(self.unseen)

    def and_then(self, others: ClientIndex) -> ClientIndex:
        """The index of these clients, and then the others, which have rows of the same kinds."""
        pairs = ((self.held, others.held), (self.validation, others.validation))
        held, validation = (None if a is None or b is None else a.and_then(b) for a, b in pairs)
        offsets = np.concatenate([self.offsets, self.offsets[-1] + others.offsets[1:]])
        both = () if self.targets is None or others.targets is None else (self.targets, others.targets)
        targets = np.concatenate(both) if both else None
        shared = [name for name in self.common if name in others.common]
        common = {name: np.concatenate([self.common[name], others.common[name]]) for name in shared}
        rows = np.concatenate([self.rows, others.rows])
        return ClientIndex(offsets, rows, held, validation, targets=targets, common=common)

    def with_common(self, name: str, column: np.ndarray) -> ClientIndex:
        """The same with a column in `common`, if all rows that a client trains on in some round have one value of it.
        column: (n,) of all training rows. Every client must have a row."""
        whole = self.whole
        values = column[whole.rows]
        firsts = values[whole.offsets[:-1]]
        alike = bool((values == np.repeat(firsts, whole.sizes)).all())
        return self._replace(common={**self.common, name: firsts}) if alike else self

    def with_targets(self, of_rows: np.ndarray) -> ClientIndex:
        """The same with `targets`, also in the indices inside it. of_rows: (n,) those of each training row."""
        held, validation, unseen = (
            None if it is None else it.with_targets(of_rows) for it in (self.held, self.validation, self.unseen)
        )
        before = np.append(0, np.cumsum(of_rows[self.rows], dtype=np.int64))
        targets = np.diff(before[self.offsets])
        return self._replace(held=held, validation=validation, unseen=unseen, targets=targets)

    @property
    def whole(self) -> ClientIndex:
        """The index of all rows that clients train on in some round."""
        return self if self.drift is None or self.drift.whole is None else self.drift.whole

    def in_windows(self) -> ClientIndex:
        """The index of the rows of round 1. With a drift these are windows, whose sizes are the same in all rounds."""
        if self.drift is None:
            return self
        sizes = np.clip(np.rint(self.drift.window * self.sizes).astype(np.int64), 1, self.sizes)
        offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        return self._replace(offsets=offsets, drift=self.drift._replace(whole=self)).at(1)

    def at(self, round: int) -> ClientIndex:
        """The index of the rows of this round, which follow from the round and the client alone."""
        if self.drift is None or (whole := self.drift.whole) is None:
            return self
        start = np.floor((max(round, 1) - 1) * self.drift.move * whole.sizes).astype(np.int64)
        within = np.arange(self.offsets[-1]) - np.repeat(self.offsets[:-1] - start, self.sizes)
        places = np.repeat(whole.offsets[:-1], self.sizes) + within % np.repeat(whole.sizes, self.sizes)
        unseen = None if self.unseen is None else self.unseen.at(round)
        return self._replace(rows=whole.rows[places], unseen=unseen)


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

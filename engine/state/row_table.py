"""The table that says which row of the files of client states (row_files.py) belongs to which client.

Only the driver has the table. A round reads committed rows and writes fresh ones; the commit makes the fresh rows the
clients' rows. Before the commit no committed row is touched, so a round can be abandoned at no cost. A checkpoint
has the table and the digest of every row. It copies no rows but pins them: they are not overwritten while it is kept.
"""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
from torch.utils import _pytree as pytree

from ..errors import StoreFull
from ..storage.atomic_write import allocate
from .row_files import (
    DIGEST,
    StateLayout,
    have_links,
    make_files,
    paths,
    positions_by_file,
    remove_files,
    rows_in_files,
    width,
)


class RowTable:
    """Which row holds the state of which client. A client gets a row when it takes part for the first time."""

    def __init__(
        self,
        sample: Any,
        clients: int,
        spare: int,
        folder: str | None = None,
        bfloat16: bool = False,
        digests: bool = False,
        shared: tuple[int, ...] = (),
    ) -> None:
        """sample: a client state. spare: the number of rows besides one for each client. folder: where the files of
        rows are made; None for a temporary folder. bfloat16, digests, shared: see `StateLayout`.

        Rows below `first` are never written: those that the run shares, and, if forks of the run have links to its
        files, all that these files have space for now.
        """
        leaves = pytree.tree_leaves(sample)
        self.width = width(leaves, bfloat16)
        existing = rows_in_files(folder, self.width) if folder and leaves else 0
        self.first = max([0, *shared, existing if existing and folder and have_links(folder) else 0])
        self.capacity = max(existing, self.first + clients + spare)
        self.row = np.full(clients, -1, dtype=np.int64)  # of each client, -1 before its first visit
        self.digest = np.zeros((clients if digests else 0, DIGEST), dtype=np.uint8)  # of each client's row
        self.pins = np.zeros(self.capacity, dtype=np.int16)  # how many checkpoints pin each row
        self.free: list[int] = []  # rows below `used` that may be written
        self.used = self.first  # the number of rows that have been taken at least once
        self.pending: tuple[np.ndarray, np.ndarray] | None = None  # (clients, fresh rows) of the round under way
        self.waiting: set[int] = set()  # fresh rows of an asynchronous run's results whose updates are yet to come
        own = self._make_files(folder) if leaves else ""
        self.layout = StateLayout(own, self.capacity, bfloat16, digests, shared=shared if own else ())
        # Pools replace these callbacks, all of which but the first receive rows (n,).
        self.on_grown: Callable[[int], None] = lambda capacity: None  # there are more rows now
        self.fetch_rows: Callable[[np.ndarray], None] = lambda rows: None  # copy rows of other nodes to this node
        self.on_restored: Callable[[np.ndarray], None] = lambda rows: None  # rows of a copy were written to this node
        # Write rows that a worker keeps in its memory to the files, see `ResidentRows.write_back`.
        self.write_rows_back: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]] | None = None

    def _make_files(self, folder: str | None) -> str:
        folder = tempfile.mkdtemp(prefix="fedfleet-state-") if folder is None else folder
        make_files(folder, self.capacity, self.width)
        return folder

    def reserve(self, clients: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Begin a round of these clients (c,).

        Returns (the rows to read, -1 for a client's first visit; the fresh rows to write), both (c,). Raises StoreFull.
        """
        fresh = self._fresh(len(clients))
        self.pending = (clients, fresh)
        return self.row[clients], fresh

    def _fresh(self, count: int) -> np.ndarray:
        """(count,) rows that may be written. Raises StoreFull."""
        reused = self.free[:count]
        new = range(self.used, self.used + count - len(reused))
        self._allocate(new)
        if new.stop > self.capacity:
            self._grow(new.stop)
        del self.free[: len(reused)]
        self.used += len(new)
        return np.array([*reused, *new], dtype=np.int64)

    def _grow(self, capacity: int) -> None:
        """Have at least this many rows. It is needed only if forks hold rows that would be free otherwise."""
        more = max(capacity - self.capacity, len(self.row))
        self.pins = np.concatenate([self.pins, np.zeros(more, dtype=self.pins.dtype)])
        self.capacity += more
        self.on_grown(self.capacity)

    def reserve_waiting(self, count: int) -> np.ndarray:
        """(count,) fresh rows for results that later updates of an asynchronous run use. Raises StoreFull."""
        fresh = self._fresh(count)
        self.waiting.update(fresh.tolist())
        return fresh

    def begin_update(self, clients: np.ndarray, fresh: np.ndarray) -> None:
        """Make the waiting rows `fresh` (c,) of these clients (c,) those of the round that `commit` ends."""
        self.waiting.difference_update(fresh.tolist())
        self.pending = (clients, fresh)

    def release_waiting(self, rows: np.ndarray) -> None:
        """No update will use these rows (c,)."""
        self.waiting.difference_update(rows.tolist())
        self._release(rows)

    def _allocate(self, rows: range) -> None:
        """Reserve disk space for new rows, so that a full disk is noticed before any work is done."""
        if not self.width:
            return
        files = paths(self.layout.folder)
        try:
            for number, positions in positions_by_file(rows):
                with open(files[number], "r+b") as file:
                    allocate(file.fileno(), positions.start * self.width, len(positions) * self.width)
        except OSError as error:
            raise StoreFull(
                f"no room for the states of {len(rows)} more clients, {len(rows) * self.width:,} bytes, in "
                f"{self.layout.folder} ({error.strerror}); make room or set engine.store to a larger disk"
            ) from error

    def commit(self, digests: np.ndarray | None = None, without: tuple[int, ...] = ()) -> None:
        """End the round: the fresh rows become the clients' rows, and their old rows are free.

        digests: (c, DIGEST) of the fresh rows, in the order of the clients that `reserve` got. without: clients that
        were dropped; they keep their old rows.
        """
        assert self.pending is not None
        clients, fresh = self.pending
        unused = fresh[:0]
        if without:
            took_part = ~np.isin(clients, without)
            unused, clients, fresh = fresh[~took_part], clients[took_part], fresh[took_part]
            digests = None if digests is None else digests[took_part]
        old = self.row[clients]
        self.row[clients] = fresh
        if digests is not None and len(self.digest):
            self.digest[clients] = digests
        self._release(np.concatenate([old[old >= 0], unused]))
        self.pending = None

    def row_after(self, without: tuple[int, ...] = ()) -> np.ndarray:
        """(N,) the row of each client as `commit` would leave it, -1 before its first visit."""
        row = self.row.copy()
        if self.pending is not None:
            clients, fresh = self.pending
            took_part = ~np.isin(clients, without)
            row[clients[took_part]] = fresh[took_part]
        return row

    def _release(self, rows: np.ndarray) -> None:
        self.free += rows[(self.pins[rows] == 0) & (rows >= self.first)].tolist()

    def abort(self) -> None:
        """Abandon the round under way, if there is one: its fresh rows are free."""
        if self.pending is not None:
            self._release(self.pending[1])
            self.pending = None

    # --- checkpoints ------------------------------------------------------------------------------------------------
    def write_back(self) -> None:
        """Have all committed rows in files, and know their digests. Raises RowsLost if a worker has lost some."""
        if self.write_rows_back is None:
            return
        clients = np.flatnonzero(self.row >= 0)
        positions, digests = self.write_rows_back(self.row[clients])
        if len(self.digest):
            self.digest[clients[positions]] = digests

    def pin(self, row: np.ndarray) -> None:
        """Do not overwrite the rows of a checkpoint. row: (N,), -1 for clients without one."""
        self.pins[row[row >= 0]] += 1

    def unpin(self, row: np.ndarray) -> None:
        """Undo `pin`. Rows that nothing uses any more are free."""
        unpinned = row[row >= 0]
        self.pins[unpinned] -= 1
        in_use = np.zeros(self.capacity, dtype=bool)
        in_use[self.row[self.row >= 0]] = True
        if self.pending is not None:
            in_use[self.pending[1]] = True
        in_use[list(self.waiting)] = True
        self._release(unpinned[~in_use[unpinned]])

    def clear(self) -> None:
        """Return to the state before round 1, without any pins."""
        if self.layout.folder and have_links(self.layout.folder):
            self.first = self.used  # forks may need any of these rows
        self.row.fill(-1)
        self.pins.fill(0)
        self.free, self.used, self.pending = [], self.first, None
        self.waiting.clear()

    def restore(self, row: np.ndarray, digest: np.ndarray, pinned: list[np.ndarray]) -> None:
        """Load the table of a checkpoint.

        row: (N,). digest: (N, DIGEST). pinned: the rows (N,) of each checkpoint that is kept, this one included.
        """
        self.row, self.digest = row.copy(), digest.copy()
        for other in pinned:
            self.pin(other)
        newest = int(max((other.max(initial=-1) for other in [row, *pinned]), default=-1))
        self.used = max(newest + 1, self.first)
        taken = self.pins > 0
        taken[row[row >= 0]] = True
        taken[: self.first] = True
        self.free = np.flatnonzero(~taken[: self.used]).tolist()

    def room(self) -> float:
        """For how many more states of every client there is space, on the disk and in rows that are free."""
        if not self.width:
            return math.inf
        free = shutil.disk_usage(self.layout.folder).free + len(self.free) * self.width
        return free / (len(self.row) * self.width)

    def sync(self, row: np.ndarray) -> None:
        """Have the rows of a checkpoint on the disk of this node. row: (N,), pinned, -1 for clients without one."""
        self.fetch_rows(row[row >= 0])
        for path in paths(self.layout.folder):
            with open(path, "r+b") as file:
                os.fsync(file.fileno())

    def remove(self) -> None:
        """Remove the files of rows."""
        remove_files(self.layout.folder)

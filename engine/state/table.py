"""Who has which row of the files of clients' states (row_files.py).

The driver owns the table client -> row. A round reads committed rows and writes fresh ones; the commit flips the table.
Until then nothing that was committed has been touched, so a round that is given up costs nothing. A checkpoint is the
table and a digest of every row: it pins its rows, which are not written again while it is kept, and copies none.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
from torch.utils import _pytree as pytree

from ..errors import StoreFull
from .row_files import DIGEST, StateLayout, make_files, paths, positions_by_file, remove_files, width


class Table:
    """Which row holds which client; rows are taken at first use. Only the driver has one."""

    def __init__(self, sample: Any, clients: int, spare: int, place: tuple[str | None, bool, bool]) -> None:
        """spare: rows beyond one a client; place: (parent folder or None for a temporary one, narrow, digests)."""
        parent, narrow, digests = place
        self.capacity = clients + spare
        self.row = np.full(clients, -1, dtype=np.int64)
        self.digest = np.zeros((clients if digests else 0, DIGEST), dtype=np.uint8)
        self.pins = np.zeros(self.capacity, dtype=np.int16)
        self.free: list[int] = []
        self.used = 0
        self.pending: tuple[np.ndarray, np.ndarray] | None = None
        leaves = pytree.tree_leaves(sample)
        self.width = width(leaves, narrow)
        self.place = StateLayout(self._make(parent) if leaves else "", self.capacity, narrow, digests)
        self.gather: Callable[[np.ndarray], None] = lambda rows: None
        self.brought: Callable[[np.ndarray], None] = lambda rows: None  # is told of rows that come from a checkpoint

    def _make(self, parent: str | None) -> str:
        folder = tempfile.mkdtemp(prefix="fedfleet-state-") if parent is None else parent
        make_files(folder, self.capacity, self.width)
        return folder

    def reserve(self, clients: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(rows to read, -1 for a client's first visit; fresh rows to write), both (c,)."""
        reused = self.free[: len(clients)]
        grown = range(self.used, self.used + len(clients) - len(reused))
        self._allocate(grown)
        del self.free[: len(reused)]
        self.used += len(grown)
        fresh = np.array([*reused, *grown], dtype=np.int64)
        self.pending = (clients, fresh)
        return self.row[clients], fresh

    def _allocate(self, rows: range) -> None:
        """Blocks on the disk for new rows, now: a full disk is met before any work is done."""
        if not self.width:
            return
        files = paths(self.place.folder)
        try:
            for number, inside in positions_by_file(rows):
                with open(files[number], "r+b") as file:
                    os.posix_fallocate(file.fileno(), inside.start * self.width, len(inside) * self.width)
        except OSError as error:
            raise StoreFull(
                f"no room for the states of {len(rows)} more clients, {len(rows) * self.width:,} bytes, in "
                f"{self.place.folder} ({error.strerror}); make room or set engine.store to a larger disk"
            ) from error

    def commit(self, digests: np.ndarray | None = None, without: tuple[int, ...] = ()) -> None:
        """The fresh rows become the clients' rows, but for those of clients `without`; the old ones are free.

        digests: (c, DIGEST), of the fresh rows in the order of the clients that were reserved for.
        """
        assert self.pending is not None
        clients, fresh = self.pending
        kept = ~np.isin(clients, without)
        old = self.row[clients[kept]]
        self.row[clients[kept]] = fresh[kept]
        if digests is not None and len(self.digest):
            self.digest[clients[kept]] = digests[kept]
        self._release(np.concatenate([old[old >= 0], fresh[~kept]]))
        self.pending = None

    def _release(self, rows: np.ndarray) -> None:
        self.free += rows[self.pins[rows] == 0].tolist()

    def abort(self) -> None:
        if self.pending is not None:
            self._release(self.pending[1])
            self.pending = None

    # --- checkpoints ------------------------------------------------------------------------------------------------
    def pin(self, row: np.ndarray) -> None:
        """Keep what these rows hold; row: (N,), -1 for none."""
        self.pins[row[row >= 0]] += 1

    def unpin(self, row: np.ndarray) -> None:
        held = row[row >= 0]
        self.pins[held] -= 1
        mine = np.zeros(self.capacity, dtype=bool)
        mine[self.row[self.row >= 0]] = True
        if self.pending is not None:
            mine[self.pending[1]] = True
        self._release(held[~mine[held]])

    def clear(self) -> None:
        """As before the first round; what is pinned is no more."""
        self.row.fill(-1)
        self.pins.fill(0)
        self.free, self.used, self.pending = [], 0, None

    def restore(self, row: np.ndarray, digest: np.ndarray, pinned: list[np.ndarray]) -> None:
        """The table of a checkpoint; `pinned`: of this and the other checkpoints that are kept."""
        self.row, self.digest = row.copy(), digest.copy()
        for other in pinned:
            self.pin(other)
        self.used = int(max((other.max(initial=-1) for other in [row, *pinned]), default=-1)) + 1
        taken = self.pins > 0
        taken[row[row >= 0]] = True
        self.free = np.flatnonzero(~taken[: self.used]).tolist()

    def sync(self, row: np.ndarray) -> None:
        """These rows, pinned, on this node's disk, whatever becomes of the machines; row: (N,), -1 for none."""
        self.gather(row[row >= 0])  # from other nodes, where there are any
        for path in paths(self.place.folder):
            with open(path, "r+b") as file:
                os.fsync(file.fileno())

    def remove(self) -> None:
        remove_files(self.place.folder)

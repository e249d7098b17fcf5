"""Clients' states as rows of sparse files: one file per leaf of the state, a client's state a row.

The driver owns the table client -> row. A round reads committed rows and writes fresh ones; the commit flips the table.
Until then nothing that was committed has been touched, so a round that is given up costs nothing. A checkpoint is the
table and a digest of every row: it pins its rows, which are not written again while it is kept, and copies none.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .errors import StoreFull

DIGEST = 32  # bytes of a SHA-256


class Place(NamedTuple):
    """Where the rows are; `folder` is "" where the method keeps no state."""

    folder: str
    capacity: int
    narrow: bool  # floats as bfloat16
    digests: bool  # whether writers say what they wrote


class Rows:
    """A process's view of the files. They are read and written, not mapped: a mapping costs a page fault every 4 KiB,
    which came to several times the copying."""

    def __init__(self, place: Place, sample: Any) -> None:
        """sample: the state of one client, for shapes and dtypes."""
        self.spec = pytree.tree_structure(sample)
        self.leaves: list[Tensor] = pytree.tree_leaves(sample)
        self.kinds = [stored(leaf, place.narrow) for leaf in self.leaves]
        self.files = [os.open(leaf_file(place.folder, i), os.O_RDWR) for i in range(len(self.leaves))]

    def __del__(self) -> None:
        for file in getattr(self, "files", []):
            os.close(file)

    def read(self, rows: Tensor) -> Any:
        """The states in `rows` (c,), stacked on a first axis."""
        found = []
        for file, leaf, kind in zip(self.files, self.leaves, self.kinds, strict=True):
            column = torch.empty(len(rows), *leaf.shape, dtype=kind)
            transfer(os.preadv, file, rows, column)
            found.append(column.to(leaf.dtype))
        return pytree.tree_unflatten(found, self.spec)

    def write(self, rows: Tensor, states: Any) -> None:
        for file, kind, leaf in zip(self.files, self.kinds, pytree.tree_leaves(states), strict=True):
            transfer(os.pwritev, file, rows, leaf.to("cpu", kind).contiguous())

    def packed(self, rows: np.ndarray) -> list[np.ndarray]:
        """A leaf each, (c, bytes of a row): as they are stored."""
        columns = [
            torch.empty(len(rows), *leaf.shape, dtype=k) for leaf, k in zip(self.leaves, self.kinds, strict=True)
        ]
        for file, column in zip(self.files, columns, strict=True):
            transfer(os.preadv, file, torch.from_numpy(rows), column)
        return [memory(column) for column in columns]

    def unpack(self, rows: np.ndarray, packed: Sequence[np.ndarray]) -> None:
        """What another node's `packed` gave, into the same rows here."""
        for file, part in zip(self.files, packed, strict=True):
            for row, data in zip(rows.tolist(), part, strict=True):
                if os.pwrite(file, data.tobytes(), row * len(data)) != len(data):
                    raise OSError(f"row {row} of a clients' state could not be written whole")

    @property
    def width(self) -> int:
        """Bytes of a row."""
        return sum(leaf.numel() * kind.itemsize for leaf, kind in zip(self.leaves, self.kinds, strict=True))

    def digests(self, rows: Tensor) -> np.ndarray:
        """(c, 32) bytes: of each row as it is stored."""
        found = np.zeros((len(rows), DIGEST), dtype=np.uint8)
        columns = [torch.empty(1, *leaf.shape, dtype=kind) for leaf, kind in zip(self.leaves, self.kinds, strict=True)]
        for i in range(len(rows)):
            sha = hashlib.sha256()
            for file, column in zip(self.files, columns, strict=True):
                transfer(os.preadv, file, rows[i : i + 1], column)
                sha.update(memory(column)[0].data)
            found[i] = np.frombuffer(sha.digest(), dtype=np.uint8)
        return found


def memory(column: Tensor) -> np.ndarray:
    """(c, bytes of a row), the tensor's own memory."""
    return column.reshape(len(column), prod(column.shape[1:])).view(torch.uint8).numpy()


def transfer(call: Callable[..., int], file: int, rows: Tensor, column: Tensor) -> None:
    """call: os.preadv or os.pwritev, for each of `rows` (c,) at its place in the file."""
    for row, place in zip(memory(column), rows.tolist(), strict=True):
        done = 0
        while done < len(row):
            moved = call(file, [row.data[done:]], place * len(row) + done)
            if not moved:
                raise OSError(f"row {place} of a clients' state ends after {done} of {len(row)} bytes")
            done += moved


def leaf_file(folder: str, number: int) -> str:
    return str(Path(folder) / f"leaf{number}.bin")


def stored(leaf: Tensor, narrow: bool) -> torch.dtype:
    return torch.bfloat16 if narrow and leaf.is_floating_point() else leaf.dtype


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
        self.widths = [leaf.numel() * stored(leaf, narrow).itemsize for leaf in leaves]
        self.place = Place(self._make(parent) if leaves else "", self.capacity, narrow, digests)
        self.gather: Callable[[np.ndarray], None] = lambda rows: None
        self.brought: Callable[[np.ndarray], None] = lambda rows: None  # is told of rows that come from a checkpoint

    def _make(self, parent: str | None) -> str:
        """The files, sparse; those of an interrupted run are taken up as they are."""
        if parent is None:
            folder = tempfile.mkdtemp(prefix="fedfleet-state-")
        else:
            folder = parent
            Path(folder).mkdir(parents=True, exist_ok=True)
        for i, width in enumerate(self.widths):
            path = leaf_file(folder, i)
            Path(path).touch()
            os.truncate(path, max(self.capacity * width, os.path.getsize(path)))
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
        if not self.place.folder or not len(rows):
            return
        for i, width in enumerate(self.widths):
            with open(leaf_file(self.place.folder, i), "r+b") as file:
                try:
                    os.posix_fallocate(file.fileno(), rows.start * width, len(rows) * width)
                except OSError as error:
                    needed = len(rows) * sum(self.widths)
                    raise StoreFull(
                        f"no room for the states of {len(rows)} more clients, {needed:,} bytes, in {self.place.folder} "
                        f"({error.strerror}); make room or set engine.store to a larger disk"
                    ) from error

    def commit(self, digests: np.ndarray | None = None, without: tuple[int, ...] = ()) -> None:
        """The fresh rows become the clients' rows, but for those of clients `without`; the old ones are free.

        digests: (c, 32), of the fresh rows in the order of the clients that were reserved for.
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
        for i in range(len(self.widths)):
            with open(leaf_file(self.place.folder, i), "r+b") as file:
                os.fsync(file.fileno())

    def remove(self) -> None:
        if self.place.folder:
            shutil.rmtree(self.place.folder, ignore_errors=True)

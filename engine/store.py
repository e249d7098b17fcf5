"""Clients' states as rows of memory-mapped, sparse files: one file per leaf of the state, a client's state a row.

The driver owns the table client -> row. A round reads committed rows and writes fresh ones; the commit flips the table.
Until then nothing that was committed has been touched, so a round that is given up costs nothing.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree


class Rows:
    """A process's view of the files. All calls are vectorised over clients."""

    def __init__(self, folder: str, sample: Any, capacity: int) -> None:
        """sample: the state of one client, for shapes and dtypes; capacity: rows."""
        self.spec = pytree.tree_structure(sample)
        self.columns = [
            torch.from_file(
                str(Path(folder) / f"leaf{i}.bin"), shared=True, size=capacity * leaf.numel(), dtype=leaf.dtype
            ).view(capacity, *leaf.shape)
            for i, leaf in enumerate(pytree.tree_leaves(sample))
        ]

    def read(self, rows: Tensor) -> Any:
        """The states in `rows` (c,), stacked on a first axis."""
        return pytree.tree_unflatten([column[rows] for column in self.columns], self.spec)

    def write(self, rows: Tensor, states: Any) -> None:
        for column, leaf in zip(self.columns, pytree.tree_leaves(states), strict=True):
            column[rows] = leaf.to(column.device)


class Table:
    """Which row holds which client; rows are taken at first use. `clients`: N; `cohort`: the most in one round."""

    def __init__(self, sample: Any, clients: int, cohort: int, folder: str | None) -> None:
        self.capacity = clients + cohort
        self.row = np.full(clients, -1, dtype=np.int64)
        self.free: list[int] = []
        self.used = 0
        self.pending: tuple[np.ndarray, np.ndarray] | None = None
        self.folder = ""
        leaves = pytree.tree_leaves(sample)
        if leaves:
            if folder is not None:
                Path(folder).mkdir(parents=True, exist_ok=True)
            self.folder = tempfile.mkdtemp(prefix="fedfleet-state-", dir=folder)
            for i, leaf in enumerate(leaves):
                path = Path(self.folder) / f"leaf{i}.bin"
                path.touch()
                os.truncate(path, self.capacity * leaf.numel() * leaf.element_size())

    def reserve(self, clients: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(rows to read, -1 for a client's first visit; fresh rows to write), both (c,)."""
        fresh = self.free[: len(clients)]
        del self.free[: len(fresh)]
        fresh += range(self.used, self.used + len(clients) - len(fresh))
        self.used = max(self.used, max(fresh) + 1)
        self.pending = (clients, np.array(fresh, dtype=np.int64))
        return self.row[clients], self.pending[1]

    def commit(self) -> None:
        """The fresh rows become the clients' rows, the old ones free."""
        assert self.pending is not None
        clients, fresh = self.pending
        old = self.row[clients]
        self.free += old[old >= 0].tolist()
        self.row[clients] = fresh
        self.pending = None

    def abort(self) -> None:
        if self.pending is not None:
            self.free += self.pending[1].tolist()
            self.pending = None

    def remove(self) -> None:
        if self.folder:
            shutil.rmtree(self.folder, ignore_errors=True)

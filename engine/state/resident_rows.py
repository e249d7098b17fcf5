"""Rows of client states that stay in the memory of a device between rounds.

A run whose rounds are trained by one worker need not bring the rows of a cohort to the processor and back in each of
them. The rows with the lowest numbers, as many as a budget allows, are then in the memory of the worker's device, one
matrix for each leaf of a state: gathered at the begin of a block and written at its end, without waiting. Rows above
them are in the files, as all of them are otherwise.

What makes a round safe stays as it is: fresh rows are written, and the table (row_table.py) makes them the clients'
rows. Before a checkpoint, and before the files are left to somebody else, `write_back` writes those rows to the files
that are not there yet, and only then are their digests known. A row that is read is the same wherever it is, so that no
bit depends on the budget.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..accelerators.faults import is_device_lost
from ..accelerators.settings import in_any_order
from ..accelerators.transfer import to_device
from ..errors import RowsLost, type_and_first_line
from ..memory import is_out_of_memory
from .row_files import DIGEST, RowFiles, digests, with_fresh

PIECE = 64 << 20
"""The most bytes of rows that are written back at once, if a row has not more."""


class ResidentRows:
    """The rows of a worker's client states, on its device as far as they fit and else in files.

    It reads and writes rows as `RowFiles` does. The digests of rows that are written to the device are zeros, until
    `write_back` gives them.
    """

    def __init__(self, files: RowFiles, capacity: int, device: torch.device, budget: Callable[[], int]) -> None:
        """capacity: the number of rows. budget: the bytes that rows may take on the device, which is asked for at the
        first write, when the memory that a block needs is known."""
        self.files, self.capacity, self.device, self.budget = files, capacity, device, budget
        self.first = files.first  # those below are only read
        self.matrices: list[Tensor] = []  # (n, …), of each leaf, from the first write on
        self.writable: np.ndarray | None = None  # see `_room`
        self.held = np.zeros(0, dtype=bool)  # (n,) whether the row is in the matrices
        self.untold = np.zeros(0, dtype=bool)  # (n,) whether the table does not have its digest

    # --- rows ---------------------------------------------------------------------------------------------------------
    def takes(self, rows: np.ndarray) -> bool:
        """Whether all of these rows (c,) are written to the device, so that the processor does not wait."""
        return bool(self._places(rows, self._room())[0].all())

    def read(self, rows: Tensor, fresh: Any) -> Any:
        """The states in `rows` (c,), stacked along a new first axis. Where a row is -1, the state is `fresh`, the state
        of one client."""
        here, places = self._places(rows.numpy(), self.held)
        if not here.any():
            return self.files.read(rows, fresh)
        found, on_device = [], to_device(torch.from_numpy(places), self.device)
        for matrix, leaf in zip(self.matrices, pytree.tree_leaves(fresh), strict=True):
            states = matrix.index_select(0, on_device).to(leaf.dtype)
            found.append(states if here.all() else with_fresh(states, torch.from_numpy(here), leaf))
        elsewhere = np.flatnonzero(~here & (rows.numpy() >= 0))
        if len(elsewhere):
            others = pytree.tree_leaves(self.files.read(rows[elsewhere], fresh))
            self._put(found, elsewhere, others)
        return pytree.tree_unflatten(found, self.files.spec)

    def write(self, rows: Tensor, states: Any) -> np.ndarray:
        """Write stacked states into `rows` (c,). Returns the digests of the rows, (c, DIGEST) uint8, see above."""
        here, places = self._places(rows.numpy(), self._room())
        told = np.zeros((len(rows), DIGEST), dtype=np.uint8)
        if here.any():
            self._put(self.matrices, places[here], pytree.tree_leaves(self._some(states, here)))
            self.held[places[here]] = self.untold[places[here]] = True
        if not here.all():
            told[~here] = self.files.write(rows[torch.from_numpy(~here)], self._some(states, ~here))
        return told

    def read_one(self, row: int) -> Any:
        """The state in one row, without an axis of clients."""
        here, (place,) = self._places(np.array([row]), self.held)
        if not here.all():
            return self.files.read_one(row)
        leaves = [
            matrix[place].to(like.dtype, copy=True)
            for matrix, (like, _) in zip(self.matrices, self.files.leaves, strict=True)
        ]
        return pytree.tree_unflatten(leaves, self.files.spec)

    def write_one(self, row: int, state: Any) -> np.ndarray:
        """Write one state, without an axis of clients, into a row. Returns the row's digest, (1, DIGEST) uint8."""
        return self.write(torch.tensor([row]), pytree.tree_map(lambda leaf: leaf.unsqueeze(0), state))

    # --- files --------------------------------------------------------------------------------------------------------
    def write_back(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Have `rows` (c,) in the files. Returns (the positions among them of the n rows whose digests were not known,
        their digests (n, DIGEST)). Raises RowsLost if the device has failed."""
        inside, places = self._places(rows, self.untold)
        positions, told = np.flatnonzero(inside), [digests([])]
        each = max(1, PIECE // max(1, self.files.width))
        for begin in range(0, len(positions), each):
            some = positions[begin : begin + each]
            told.append(self._written(rows[some], places[some]))
        self.untold[places[positions]] = False
        return positions, np.concatenate(told)

    def _written(self, rows: np.ndarray, places: np.ndarray) -> np.ndarray:
        """The digests (c, DIGEST) of some rows (c,), which are written to the files unless they are there."""
        if not self.matrices:
            return self.files.digests(rows)
        try:
            chosen = to_device(torch.from_numpy(places), self.device)
            states = [matrix.index_select(0, chosen).to("cpu") for matrix in self.matrices]
        except RuntimeError as error:
            if not is_device_lost(error):
                raise
            why = f"client states were lost with {self.device} ({type_and_first_line(error)})"
            raise RowsLost(why) from error
        return self.files.write(torch.from_numpy(rows), pytree.tree_unflatten(states, self.files.spec))

    def forget(self, rows: np.ndarray) -> None:
        """The files have other states in `rows` (c,) than before."""
        here, places = self._places(rows, self.held)
        self.held[places[here]] = self.untold[places[here]] = False

    def leave(self) -> None:
        """Have all rows in the files from here on, because the device has too little memory for what runs there."""
        rows = self.first + np.flatnonzero(self.held & self.untold)
        for some in np.array_split(rows, max(1, len(rows) * self.files.width // PIECE)):
            self._written(some, some - self.first)
        self.held[:] = False
        self.matrices, self.writable = [], np.zeros(0, dtype=bool)

    # --- the device ---------------------------------------------------------------------------------------------------
    def _room(self) -> np.ndarray:
        """(n,) which places of the device may be written to: all, or none once rows have left it."""
        if self.writable is None:
            count = min(self.capacity - self.first, self.budget() // max(1, self.files.width))
            try:
                self.matrices = [
                    torch.empty(count, *leaf.shape, dtype=dtype, device=self.device)
                    for leaf, dtype in self.files.leaves
                ]
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                count, self.matrices = 0, []
            self.writable = np.ones(count, dtype=bool)
            self.held, self.untold = np.zeros(count, dtype=bool), np.zeros(count, dtype=bool)
        return self.writable

    def _places(self, rows: np.ndarray, among: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(which of the rows (c,) have a place on the device and are `among` (n,) places; the places (c,), 0 for the
        others)."""
        places = rows - self.first
        inside = (places >= 0) & (places < len(among))
        places = np.where(inside, places, 0)
        return (inside & among[places] if len(among) else inside), places

    def _some(self, states: Any, those: np.ndarray) -> Any:
        """The states of those clients (c,) among stacked ones."""
        if those.all():
            return states
        chosen = to_device(torch.from_numpy(np.flatnonzero(those)), self.device)
        return pytree.tree_map(lambda leaf: leaf.index_select(0, chosen), states)

    def _put(self, into: list[Tensor], places: np.ndarray, leaves: list[Tensor]) -> None:
        """Write entries (c, …) to the places (c,) of tensors, all of which are different."""
        chosen = to_device(torch.from_numpy(places), self.device)
        with in_any_order():
            for tensor, leaf in zip(into, leaves, strict=True):
                tensor.index_copy_(0, chosen, leaf.to(tensor.dtype))

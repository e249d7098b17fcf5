"""Where a worker's device gathers batches from.

A batch is some rows of the training set's columns. On the processor the rows are gathered from the columns themselves.
For another device there are three ways, and all of them give the same batches:

- resident: the columns are on the device as long as the worker lives, if they fit into its share of the memory;
- chunk: the rows that a task needs are collected in pinned memory, and copied to the device once per task;
- batch: every batch is collected in the processor's memory and copied, if not even the rows of a task fit.

With the first two ways, batches are gathered on the device, and the processor does not wait for it.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from .transfer import to_device


class DeviceColumns:
    """The columns of a training set for one worker. `resident`: the columns on the device, or None."""

    def __init__(self, columns: Mapping[str, Tensor], device: torch.device, budget: int | None = None) -> None:
        """budget: the bytes of the device's memory that rows may take; None for no limit."""
        self.columns, self.device, self.budget = columns, device, budget
        self.resident: Mapping[str, Tensor] | None = columns if device.type == "cpu" and budget is None else None
        if self.resident is None and fits(byte_count(columns), budget):
            self.resident = {name: column.to(device) for name, column in columns.items()}  # once: it may be waited for

    def place(self, rows: Tensor) -> tuple[Mapping[str, Tensor], Tensor]:
        """(the columns from which the batches of a task are gathered, the places (c, K, B) of their rows in them).
        rows: (c, K, B), of all rows of the training set."""
        if self.resident is not None:
            return self.resident, to_device(rows, self.device)
        wanted, places = np.unique(rows.numpy(), return_inverse=True)
        bytes_of_row = byte_count(self.columns) // max(1, len(next(iter(self.columns.values()))))
        if not fits(bytes_of_row * len(wanted), self.budget):
            return self.columns, rows
        chosen = torch.from_numpy(wanted)
        chunk = {name: to_device(column.index_select(0, chosen), self.device) for name, column in self.columns.items()}
        return chunk, to_device(torch.from_numpy(places.reshape(rows.shape)), self.device)


def fits(size: int, budget: int | None) -> bool:
    return budget is None or size <= budget


def byte_count(columns: Mapping[str, Tensor]) -> int:
    """The bytes of all columns."""
    return sum(column.numel() * column.element_size() for column in columns.values())

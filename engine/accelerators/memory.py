"""The memory of a device that a worker may use, beside other workers on the same card."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

ROWS_SHARE = 0.5
"""The share of a worker's free memory that the columns of the training set may take."""
STATES_SHARE = 0.5
"""The share of the memory that is free beside a block of clients which rows of client states may take."""
LEAST_SHARE = 0.01


@contextmanager
def bounded_memory(device: torch.device, gpus: float) -> Iterator[None]:
    """A context in which this process is bound to its share of the card, see `bound_memory`."""
    restore = bound_memory(device, gpus)
    try:
        yield
    finally:
        restore()


def bound_memory(device: torch.device, gpus: float) -> Callable[[], None]:
    """Bound this process to its share of the card: a quarter for gpus = 0.25. A whole card, or several, has no bound.

    Without the bound a worker could take the memory of its neighbours, who would then fail in its place. Returns what
    restores the bound that was there before.
    """
    if device.type != "cuda" or not 0 < gpus < 1:
        return lambda: None
    index = index_of(device)
    before = torch.cuda.get_per_process_memory_fraction(index)
    torch.cuda.set_per_process_memory_fraction(max(gpus, LEAST_SHARE), index)
    return lambda: torch.cuda.set_per_process_memory_fraction(before, index)


def index_of(device: torch.device) -> int:
    """The number of a CUDA device: the current one if the device has none. Some functions of torch require it."""
    return torch.cuda.current_device() if device.index is None else device.index


def free_memory(device: torch.device) -> int | None:
    """The bytes of the device's memory that this process can still allocate; None for the processor, and for devices
    that do not say."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    held, used = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
    share = int(torch.cuda.get_per_process_memory_fraction(index_of(device)) * total)
    return max(0, min(free + held - used, share - used))


def row_budget(device: torch.device) -> int | None:
    """The bytes that training columns may take on the device; None for no limit."""
    free = free_memory(device)
    return None if free is None else int(ROWS_SHARE * free)


def state_budget(device: torch.device) -> int:
    """The bytes that rows of client states may take on the device, once a block of clients has run there."""
    free = free_memory(device)
    if free is None:
        return 0
    block = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
    return int(STATES_SHARE * max(0, free - block))


def allocated_memory(device: torch.device) -> int:
    """The bytes of tensors on the device; 0 for the processor."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def peak_memory(device: torch.device) -> int:
    """The largest number of bytes of tensors on the device since the last call; 0 for the processor."""
    if device.type != "cuda":
        return 0
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return peak

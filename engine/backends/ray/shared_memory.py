"""Memory that a pool shares with its workers on one node. It holds the broadcast and the results of tasks.

Workers claim tasks in it by themselves. A round therefore costs one message per worker, and not two per task, and a
result of some megabytes costs one copy. The memory has no name in the file system; the system removes it when the last
process that has it open ends.

A process that sees the flag of a slot must also see everything that was written before the flag was set, also on
processors that reorder stores (ARM). Python has no instruction for this, but the kernel's lock of a file orders memory.
A flag is set only while the memory's lock is held, and a process that has seen a flag takes the lock before it reads
on. It can take the lock only after the process that set the flag has released it, and what was done before a lock is
released is seen after it is taken. Writing to a pipe and reading from it (`wakeup`) orders memory in the same way, so
orders and the broadcast need no lock.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any, NamedTuple

import numpy as np

ALIGNED = 64  # bytes of a cache line
DONE, WITHDRAWN = -1, -2
FIRST_OPEN = -3
"""The owner of a slot that is open for the order with the number n is FIRST_OPEN - n. A worker that still looks through
an earlier order must not claim a slot that was opened again for a later one."""
"""Owners of a slot: no worker has claimed its task; its result is there; no worker may claim it any more. Otherwise the
owner is the number of the worker that has claimed the task, plus 1."""


class Spec(NamedTuple):
    """The shape of an array, and its dtype as NumPy writes it."""

    shape: tuple[int, ...]
    dtype: str

    @staticmethod
    def of(array: np.ndarray) -> Spec:
        return Spec(array.shape, array.dtype.str)

    @property
    def bytes(self) -> int:
        return aligned(prod(self.shape) * np.dtype(self.dtype).itemsize)


def nameless(label: str) -> tuple[int, str]:
    """Make an empty file in memory. Returns its handle, and the path by which other processes of the node open it.

    label: a name for lists of open files. The file is gone when no process has it open.
    """
    handle = os.memfd_create(label)
    return handle, f"/proc/{os.getpid()}/fd/{handle}"


def aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


class Address(NamedTuple):
    """How another process of the node opens the memory, and its sizes in bytes."""

    path: str
    head: int  # of the broadcast
    arrays: int  # of the sums of a task
    reply: int  # of everything else that a task returns
    slots: int

    @property
    def total(self) -> int:
        return aligned(8 * self.slots) + self.head + self.slots * (self.arrays + self.reply)


class SharedMemory:
    """The broadcast, and a slot for each task: its owner, its sums, and its reply.

    A slot goes through these states: `open` (a worker may claim it for one order), `claim`, `put` (its result is
    there). `withdraw` ends an open slot.
    """

    def __init__(self, address: Address) -> None:
        """Open a memory that `make` made, perhaps in another process."""
        self.address = address
        self.handle = os.open(address.path, os.O_RDWR)
        self.memory = mmap.mmap(self.handle, address.total)
        self.owners = np.ndarray((address.slots,), np.int64, self.memory)
        self.head = aligned(8 * address.slots)
        self.known: dict[tuple[int, tuple[Spec, ...]], list[np.ndarray]] = {}  # (offset, specs) -> views

    @staticmethod
    def make(head: int, arrays: int, reply: int, slots: int) -> SharedMemory:
        """Make a memory of these sizes, see `Address`."""
        handle, path = nameless("fedfleet-memory")
        address = Address(path, aligned(head), aligned(arrays), aligned(reply), slots)
        os.ftruncate(handle, address.total)
        memory = SharedMemory(address)
        memory.keep = handle  # other processes open it by this handle
        return memory

    keep: int | None = None

    def close(self) -> None:
        """Close the memory. No other process can open it any more; one that has it open can still read it."""
        for handle in (self.handle, self.keep):
            if handle is not None:
                os.close(handle)

    # --- the broadcast ------------------------------------------------------------------------------------------------
    def post(self, arrays: Sequence[np.ndarray]) -> tuple[Spec, ...]:
        """Write the arrays of the broadcast; returns what `posted` needs to read them."""
        return self._write(self.head, arrays)

    def posted(self, specs: tuple[Spec, ...]) -> list[np.ndarray]:
        """Views of the arrays of the broadcast, valid as long as a task that reads them is under way."""
        return self._views(self.head, specs)

    def post_changes(self, arrays: Sequence[np.ndarray], before: Sequence[np.ndarray]) -> tuple[Spec, ...]:
        """The same as `post` where the memory holds the arrays `before`: what is the same array is not written."""
        specs = tuple(map(Spec.of, arrays))
        for index, (view, array) in enumerate(zip(self._views(self.head, specs), arrays, strict=True)):
            if index >= len(before) or array is not before[index]:
                view[...] = array
        return specs

    # --- tasks ------------------------------------------------------------------------------------------------------
    def open(self, slots: Sequence[int], order: int) -> None:
        """Allow workers to claim these slots for the order with this number, which is 0 or more."""
        with self._locked():
            self.owners[list(slots)] = FIRST_OPEN - order

    def claim(self, slots: Sequence[int], order: int, worker: int) -> int | None:
        """Claim the first of these slots that is open for the order. Returns its index in `slots`, or None if there is
        none."""
        with self._locked():
            for index, slot in enumerate(slots):
                if self.owners[slot] == FIRST_OPEN - order:
                    self.owners[slot] = worker + 1
                    return index
            return None

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock of the memory. The kernel releases it if the process dies."""
        fcntl.flock(self.handle, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self.handle, fcntl.LOCK_UN)

    def unclaimed(self) -> int:
        """The number of slots that are open."""
        return int((self.owners <= FIRST_OPEN).sum())

    def withdraw(self, slots: Sequence[int], order: int) -> None:
        """Close the slots of an order that no worker has claimed. Workers finish the tasks that they have claimed."""
        with self._locked():
            for slot in slots:
                if self.owners[slot] == FIRST_OPEN - order:
                    self.owners[slot] = WITHDRAWN

    def claimed_by(self, slot: int) -> int:
        """The number of the worker that has claimed this slot and has not finished its task; -1 if there is none."""
        return int(self.owners[slot]) - 1 if self.owners[slot] > 0 else -1

    def space(self, slot: int, specs: tuple[Spec, ...]) -> list[np.ndarray]:
        """Views of the memory for the sums of a task. `put` need not copy sums that are made there."""
        return self._views(self._slot(slot), specs)

    def put(self, slot: int, reply: Any, arrays: Sequence[np.ndarray]) -> None:
        """Write the arrays of a result, and a reply that can be pickled. ValueError if either is too long."""
        offset = self._slot(slot)
        if (size := sum(Spec.of(array).bytes for array in arrays)) > self.address.arrays:
            raise ValueError(f"a task's arrays must fit in {self.address.arrays} bytes, got {size}")
        specs = self._write(offset, arrays)
        content = pickle.dumps((reply, specs), protocol=5)
        begin = offset + self.address.arrays
        if len(content) + 8 > self.address.reply:
            raise ValueError(f"a task's reply must fit in {self.address.reply} bytes, got {len(content)}")
        self.memory[begin : begin + 8] = len(content).to_bytes(8, "little")
        self.memory[begin + 8 : begin + 8 + len(content)] = content
        with self._locked():
            self.owners[slot] = DONE

    def get(self, slot: int) -> tuple[Any, list[np.ndarray]] | None:
        """The reply of a task and views of its arrays; None while the task is not done.

        The views are valid until the slot is written again.
        """
        if self.owners[slot] != DONE:
            return None
        with self._locked():
            pass  # after this, everything that `put` wrote is seen
        offset = self._slot(slot)
        begin = offset + self.address.arrays
        size = int.from_bytes(self.memory[begin : begin + 8], "little")
        # A process of this run wrote these bytes, in memory that no other user can open.
        reply, specs = pickle.loads(self.memory[begin + 8 : begin + 8 + size])
        return reply, self._views(offset, specs)

    def _slot(self, slot: int) -> int:
        return self.head + self.address.head + slot * (self.address.arrays + self.address.reply)

    def _write(self, offset: int, arrays: Sequence[np.ndarray]) -> tuple[Spec, ...]:
        specs = tuple(map(Spec.of, arrays))
        for view, array in zip(self._views(offset, specs), arrays, strict=True):
            if not np.may_share_memory(view, array):
                view[...] = array
        return specs

    def _views(self, offset: int, specs: tuple[Spec, ...]) -> list[np.ndarray]:
        """Arrays that lie one after the other. They are made once, because a run asks for the same ones again."""
        views = self.known.get((offset, specs))
        if views is None:
            ends = np.cumsum([offset, *(spec.bytes for spec in specs)]).tolist()
            views = [np.ndarray(*spec, self.memory, begin) for spec, begin in zip(specs, ends, strict=False)]
            self.known[offset, specs] = views
        return views

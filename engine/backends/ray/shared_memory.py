"""Memory that the driver and the workers of its node share: what is broadcast, and the tasks' results.

Workers pull tasks from it by themselves, so that a round costs a message a worker and not two a task, and results of
megabytes cost a copy. (Through Ray's calls and its object store, tasks took 10 % of a round of LeNet clients on two
cores.) The memory has no name in the file system and goes with the last process that has it open.

Whoever sees a slot's flag must also see what was written before the flag was set, on processors that reorder stores
(ARM) as well. Python has no such stores, but the kernel's lock of a file orders memory: a flag is only ever set while
the memory's lock is held, and who has seen one takes the lock before reading on. The flag was set by a holder, so
whoever takes the lock after having seen it takes it after that holder has released it; and all that was done before a
lock's release is seen after it is acquired. The same holds of a pipe's write and read (`wakeup`), which is why orders
and what is broadcast need no lock.
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

ALIGNED = 64  # bytes, a cache line
FREE, DONE, WITHDRAWN = 0, -1, -2
"""A slot's owner while nobody has claimed its task, once its result is there, and once nobody shall run it any more;
else the worker's number + 1."""


class Spec(NamedTuple):
    """An array's shape and dtype."""

    shape: tuple[int, ...]
    dtype: str

    @staticmethod
    def of(array: np.ndarray) -> Spec:
        return Spec(array.shape, array.dtype.str)

    @property
    def bytes(self) -> int:
        return aligned(prod(self.shape) * np.dtype(self.dtype).itemsize)


def nameless(label: str) -> tuple[int, str]:
    """(handle, how another process of this node opens it) of an empty file in memory that goes with its openers."""
    handle = os.memfd_create(label)
    return handle, f"/proc/{os.getpid()}/fd/{handle}"


def aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


class Address(NamedTuple):
    """How another process of this node opens the memory, and its sizes in bytes."""

    path: str
    head: int  # what is broadcast
    arrays: int  # a task's sums
    reply: int  # what else it returns
    slots: int

    @property
    def total(self) -> int:
        return aligned(8 * self.slots) + self.head + self.slots * (self.arrays + self.reply)


class SharedMemory:
    def __init__(self, address: Address) -> None:
        """Open a memory that `make` made, perhaps in another process."""
        self.address = address
        self.handle = os.open(address.path, os.O_RDWR)
        self.memory = mmap.mmap(self.handle, address.total)
        self.owners = np.ndarray((address.slots,), np.int64, self.memory)
        self.head = aligned(8 * address.slots)
        self.known: dict[tuple[int, tuple[Spec, ...]], list[np.ndarray]] = {}  # views, by where and what they are

    @staticmethod
    def make(head: int, arrays: int, reply: int, slots: int) -> SharedMemory:
        handle, path = nameless("fedfleet-memory")
        address = Address(path, aligned(head), aligned(arrays), aligned(reply), slots)
        os.ftruncate(handle, address.total)
        memory = SharedMemory(address)
        memory.keep = handle  # others reach it by this process's handle
        return memory

    keep: int | None = None

    def close(self) -> None:
        """No process can open it any more; those that have, may still read."""
        for handle in (self.handle, self.keep):
            if handle is not None:
                os.close(handle)

    # --- what is broadcast ------------------------------------------------------------------------------------------
    def post(self, arrays: Sequence[np.ndarray]) -> tuple[Spec, ...]:
        return self._write(self.head, arrays)

    def posted(self, specs: tuple[Spec, ...]) -> list[np.ndarray]:
        """Copies."""
        return [view.copy() for view in self._views(self.head, specs)]

    # --- tasks ------------------------------------------------------------------------------------------------------
    def open(self, slots: Sequence[int]) -> None:
        """Tasks to claim."""
        with self._locked():
            self.owners[list(slots)] = FREE

    def claim(self, slots: Sequence[int], worker: int) -> int | None:
        """The first of these slots that nobody has claimed, as its place among them."""
        with self._locked():
            for place, slot in enumerate(slots):
                if self.owners[slot] == FREE:
                    self.owners[slot] = worker + 1
                    return place
            return None

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """One process at a time; the kernel frees the lock if its holder dies."""
        fcntl.flock(self.handle, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self.handle, fcntl.LOCK_UN)

    def withdraw(self, slots: Sequence[int]) -> None:
        """Nobody claims these tasks any more; those that are claimed already go on."""
        fcntl.flock(self.handle, fcntl.LOCK_EX)
        try:
            for slot in slots:
                if self.owners[slot] == FREE:
                    self.owners[slot] = WITHDRAWN
        finally:
            fcntl.flock(self.handle, fcntl.LOCK_UN)

    def claimed_by(self, slot: int) -> int:
        """The number of the worker that has claimed it and not finished; -1 for none."""
        return int(self.owners[slot]) - 1 if self.owners[slot] > 0 else -1

    def room(self, slot: int, specs: tuple[Spec, ...]) -> list[np.ndarray]:
        """Where `put` has such arrays: those that lie there already it does not copy."""
        return self._views(self._slot(slot), specs)

    def put(self, slot: int, reply: Any, arrays: Sequence[np.ndarray]) -> None:
        """A task's result: arrays into their place, the rest as bytes; then it is done."""
        offset = self._slot(slot)
        specs = self._write(offset, arrays)
        told = pickle.dumps((reply, specs), protocol=5)
        at = offset + self.address.arrays
        if len(told) + 8 > self.address.reply:
            raise ValueError(f"a task's reply must fit in {self.address.reply} bytes, got {len(told)}")
        self.memory[at : at + 8] = len(told).to_bytes(8, "little")
        self.memory[at + 8 : at + 8 + len(told)] = told
        with self._locked():
            self.owners[slot] = DONE

    def get(self, slot: int) -> tuple[Any, list[np.ndarray]] | None:
        """(reply, views of the arrays, good until the slot is written again), or None while it is not done."""
        if self.owners[slot] != DONE:
            return None
        with self._locked():
            pass  # from here on all that `put` wrote is seen
        offset = self._slot(slot)
        at = offset + self.address.arrays
        size = int.from_bytes(self.memory[at : at + 8], "little")
        # Bytes of this run's own processes, in memory that no other user can open.
        reply, specs = pickle.loads(self.memory[at + 8 : at + 8 + size])
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
        """Made once: a run asks for the same ones again and again."""
        views = self.known.get((offset, specs))
        if views is None:
            ends = np.cumsum([offset, *(spec.bytes for spec in specs)]).tolist()
            views = [np.ndarray(*spec, self.memory, at) for spec, at in zip(specs, ends, strict=False)]
            self.known[offset, specs] = views
        return views

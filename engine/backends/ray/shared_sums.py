"""Memory in which a worker gives its sums to the driver, where both are on one node.

Ray's object store would do the same with a file, but each object costs calls of three processes: with sums of 10 MB a
round takes 4 % longer. So each worker has a few files in memory (memfd), which the driver opens by the worker's folder
in /proc. A call says which of them is free, and its reply says where in it the sums are. The driver adds the sums where
they lie. A file is free again when none of its arrays is in use. It needs no removal: it ends with the processes that
have it open.

What is too large, what comes from another node, and what finds no free file comes with the reply, by Ray.
"""

from __future__ import annotations

import math
import mmap
import os
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from ...reduction.tree import PartialSum, TreeNode

FILES = 4
"""The files of a worker: one for each call that it has, and as many whose sums wait for their neighbours' sums."""
FILE_BYTES = 1 << 28
"""The size of a file. Memory is taken only for what was written. Larger sums come with the reply; what the object store
costs is little beside the time that such models take."""
ALIGNMENT = 64
"""Bytes: vector instructions read arrays fastest if they begin at a multiple of it."""


class Leaf(NamedTuple):
    """Where an array is in a file: its first byte, its type and its shape."""

    begin: int
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def end(self) -> int:
        return self.begin + self.dtype.itemsize * math.prod(self.shape)

    def of(self, memory: np.ndarray) -> np.ndarray:
        """The array. memory: (bytes of the file,) uint8."""
        return memory[self.begin : self.end].view(self.dtype).reshape(self.shape)


Places = list[tuple[TreeNode, list[Leaf]]]
"""Where the sums of nodes of the tree are in a file."""


class OwnFiles:
    """The files of a worker, in its process."""

    def __init__(self) -> None:
        self.files: list[int] = []
        self.memory: list[np.ndarray] = []
        if not hasattr(os, "memfd_create"):  # as on macOS; then all sums come with the replies
            return
        with suppress(OSError):  # a limit of the process may forbid them
            for _ in range(FILES):
                file = os.memfd_create("fedfleet-sums")
                os.truncate(file, FILE_BYTES)
                self.memory.append(np.frombuffer(mmap.mmap(file, FILE_BYTES), dtype=np.uint8))
                self.files.append(file)

    def write(self, number: int, sums: Sequence[PartialSum]) -> Places | None:
        """Write sums into a file. number: of the file. Returns where they are; None if there are none, or if they are
        too large."""
        places, end = [], 0
        for part in sums:
            leaves = []
            for leaf in part.leaves:
                leaves.append(Leaf(-(-end // ALIGNMENT) * ALIGNMENT, leaf.dtype, leaf.shape))
                end = leaves[-1].end
            places.append((part.at, leaves))
        if not 0 < end <= FILE_BYTES:
            return None
        for part, (_, leaves) in zip(sums, places, strict=True):
            for place, leaf in zip(leaves, part.leaves, strict=True):
                place.of(self.memory[number])[...] = leaf
        return places


class Lent(np.ndarray):
    """(n,) uint8: the memory of a file, as long as an array that is a part of it is in use."""


class FilesOfWorker:
    """The files of a worker, in the process of the driver."""

    def __init__(self, process: int, files: Iterable[int]) -> None:
        """process: of the worker, on this node. files: the numbers of its open files. There are no files where the
        system does not let them be opened, as between two containers."""
        self.memory: list[np.ndarray] = []
        with suppress(OSError):
            for file in files:
                with open(f"/proc/{process}/fd/{file}", "rb") as opened:
                    mapped = mmap.mmap(opened.fileno(), FILE_BYTES, access=mmap.ACCESS_READ)
                self.memory.append(np.frombuffer(mapped, dtype=np.uint8))
        self.free = list(range(len(self.memory)))

    def take(self) -> int | None:
        """The number of a free file, for a call; None if there is none. The lowest, so that few files are written."""
        return self.free.pop(self.free.index(min(self.free))) if self.free else None

    def read(self, number: int, places: Places) -> list[PartialSum]:
        """The sums in a file, which is free again when none of their arrays is in use."""
        lent = self.memory[number].view(Lent)
        weakref.finalize(lent, self.free.append, number)
        return [PartialSum(at, [np.asarray(leaf.of(lent)) for leaf in leaves]) for at, leaves in places]

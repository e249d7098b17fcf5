"""Client states on the disk, in sparse files.

The state of a client is a row: the bytes of its leaves, one leaf after another. The rows are distributed over several
files, because a file system lets only one process at a time write to a file, so that two workers would wait for each
other. The files are read and written, not mapped into memory: a mapping costs a page fault every 4 KiB, which takes
longer than the copying (benchmarks/RESULTS.md has the times).

A fork begins with rows of the run that it is a fork of, see sharing.py: those below the last number of
`StateLayout.shared` are in files that it has in common with this run, and only reads.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from torch import Tensor
from torch.utils import _pytree as pytree

from ..accelerators.transfer import to_device
from ..storage.plain_files import open_plain

DIGEST = 16
"""Bytes of a row's digest (XXH3, 128 bits). It finds damage in a small part of the time that SHA-256 takes, see
benchmarks/RESULTS.md. The files of checkpoints themselves have SHA-256 digests."""
FILES = 16
"""The number of files over which the rows are distributed."""
SHARED = "shared.json"
"""The file with the ends of the ranges of rows that a fork shares with the runs it is a fork of."""
PIECES_PER_CALL = os.sysconf("SC_IOV_MAX")
"""The largest number of pieces of memory that one system call reads or writes."""
Memory = Sequence[np.ndarray]
"""The pieces of memory of one row: uint8 arrays (bytes,)."""


class StateLayout(NamedTuple):
    """Where and how client states are stored."""

    folder: str  # "" if the method's clients keep no state
    capacity: int  # the number of rows
    bfloat16: bool  # whether tensors of floating-point numbers are stored as bfloat16
    digests: bool  # whether workers return the digests of the rows that they write
    messages: str = ""  # the folder of the messages of a round, "" where workers add them up
    shared: tuple[int, ...] = ()  # the ends of the ranges of rows that a fork shares with the runs it is a fork of


class RowFiles:
    """The open files of rows, as one process uses them. `width`: bytes of a row."""

    def __init__(self, layout: StateLayout, sample: Any) -> None:
        """sample: a client state, for its structure, shapes and dtypes."""
        leaves, self.spec = pytree.tree_flatten(sample)
        self.leaves = [(leaf, stored_dtype(leaf, layout.bfloat16)) for leaf in leaves]
        self.width = width(leaves, layout.bfloat16)
        self.files = [os.open(path, os.O_RDWR) for path in paths(layout.folder)]
        self.shared = [
            (end, [os.open(path, os.O_RDONLY) for path in paths(shared_folder(layout.folder, number))])
            for number, end in enumerate(layout.shared)
            if os.path.isdir(shared_folder(layout.folder, number))  # other nodes have copies in their own files
        ]
        self.first = self.shared[-1][0] if self.shared else 0  # rows from here on are in the run's own files

    def __del__(self) -> None:
        for file in [
            *getattr(self, "files", []),
            *(file for _, files in getattr(self, "shared", []) for file in files),
        ]:
            os.close(file)

    def _files_of(self, row: int) -> list[int]:
        """The files of a row below `first`."""
        return next(files for end, files in self.shared if row < end)

    def read(self, rows: Tensor, fresh: Any) -> Any:
        """The states in `rows` (c,), stacked along a new first axis. Where a row is -1, the state is `fresh`, the
        state of one client."""
        columns = [torch.empty(len(rows), *leaf.shape, dtype=dtype) for leaf, dtype in self.leaves]
        known = rows >= 0
        self._transfer(os.preadv, zip(rows.tolist(), pieces(columns), strict=True))
        found = []
        for column, leaf in zip(columns, pytree.tree_leaves(fresh), strict=True):
            states = to_device(column, leaf.device).to(leaf.dtype)
            if not known.all():
                states = with_fresh(states, known, leaf)
            found.append(states)
        return pytree.tree_unflatten(found, self.spec)

    def write(self, rows: Tensor, states: Any) -> np.ndarray:
        """Write stacked states into `rows` (c,). Returns the digests of the rows, (c, DIGEST) uint8."""
        memory = list(pieces(self._to_stored(states)))
        self._transfer(os.pwritev, zip(rows.tolist(), memory, strict=True))
        return digests(memory)

    def read_one(self, row: int) -> Any:
        """The state in one row, without an axis of clients."""
        leaves = [torch.empty(leaf.shape, dtype=dtype) for leaf, dtype in self.leaves]
        self._transfer(os.preadv, [(row, [memory_of(leaf) for leaf in leaves])])
        found = [
            to_device(leaf, like.device).to(like.dtype) for leaf, (like, _) in zip(leaves, self.leaves, strict=True)
        ]
        return pytree.tree_unflatten(found, self.spec)

    def write_one(self, row: int, state: Any) -> np.ndarray:
        """Write one state, without an axis of clients, into a row. Returns the row's digest, (1, DIGEST) uint8."""
        memory = [memory_of(leaf) for leaf in self._to_stored(state)]
        self._transfer(os.pwritev, [(row, memory)])
        return digests([memory])

    def _to_stored(self, state: Any) -> list[Tensor]:
        """The leaves of a state, or of stacked states, in the dtypes in which they are stored."""
        pairs = zip(pytree.tree_leaves(state), self.leaves, strict=True)
        return [leaf.to("cpu", dtype).contiguous() for leaf, (_, dtype) in pairs]

    def packed(self, rows: np.ndarray) -> np.ndarray:
        """The stored bytes of `rows` (c,): an array (c, width) uint8."""
        found = np.empty((len(rows), self.width), dtype=np.uint8)
        self._transfer(os.preadv, ((row, [data]) for row, data in zip(rows.tolist(), found, strict=True)))
        return found

    def unpack(self, rows: np.ndarray, packed: np.ndarray) -> None:
        """Write what `packed` returned, perhaps on another node, into `rows` (c,)."""
        pairs = zip(rows.tolist(), packed, strict=True)
        self._transfer(os.pwritev, ((row, [data]) for row, data in pairs if row >= self.first))  # the others are here

    def digests(self, rows: np.ndarray) -> np.ndarray:
        """The digests of `rows` (c,) as they are stored: (c, DIGEST) uint8."""
        return np.concatenate([digests([]), *(digests([[self.packed(row)[0]]]) for row in rows[:, None])])

    def _transfer(self, call: Callable[..., int], rows: Iterable[tuple[int, Memory]]) -> None:
        """Read or write rows. call: os.preadv or os.pwritev. rows: (row, its memory); rows that are -1 are skipped."""
        for row, memory in rows:
            if row < 0:
                continue
            file_number, position = locate(row)
            files = self.files if row >= self.first else self._files_of(row)
            done, left = 0, memory
            while done < self.width:
                moved = call(files[file_number], left[:PIECES_PER_CALL], position * self.width + done)
                if not moved:
                    raise OSError(f"row {row} of the client states ends after {done} of {self.width} bytes")
                done += moved
                left = skip_bytes(left, moved) if done < self.width else []


def digests(rows: Sequence[Memory]) -> np.ndarray:
    """The digests of c rows that are given by their memory: (c, DIGEST) uint8."""
    found = []
    for row in rows:
        hasher = xxhash.xxh3_128()
        for piece in row:
            hasher.update(piece.data)
        found.append(hasher.digest())
    return np.frombuffer(b"".join(found), dtype=np.uint8).reshape(len(rows), DIGEST)


def memory_of(leaf: Tensor) -> np.ndarray:
    """The memory of a contiguous tensor, as an array (bytes,) uint8."""
    return leaf.view(-1).view(torch.uint8).numpy()


def pieces(columns: Sequence[Tensor]) -> Iterator[Memory]:
    """For each of c clients, the memory of its entries in every column (c, …)."""
    return map(list, zip(*(memory_of(column).reshape(len(column), -1) for column in columns), strict=True))


def skip_bytes(memory: Memory, count: int) -> Memory:
    """The memory without its first `count` bytes."""
    left = []
    for piece in memory:
        left.append(piece[min(count, len(piece)) :])
        count -= min(count, len(piece))
    return [piece for piece in left if len(piece)]


def with_fresh(states: Tensor, known: Tensor, fresh: Tensor) -> Tensor:
    """States (c, …) in which those of the clients that are not `known` (c,) are `fresh`.

    On the processor they are written in place; elsewhere that would make the processor count them first.
    """
    if states.device.type == "cpu":
        states[~known] = fresh
        return states
    return torch.where(to_device(known, states.device).view(-1, *[1] * fresh.ndim), states, fresh)


# --- the files --------------------------------------------------------------------------------------------------------
def paths(folder: str) -> list[str]:
    """The files of rows in a folder; an empty list if `folder` is "", because the method's clients keep no state."""
    if not folder:
        return []
    return [str(Path(folder) / f"rows{i:02}.bin") for i in range(FILES)]


def locate(row: int) -> tuple[int, int]:
    """(the number of the file that holds a row, the position of the row in it)."""
    return row % FILES, row // FILES


def positions_by_file(rows: range) -> Iterator[tuple[int, range]]:
    """(number of a file, the positions in it) of consecutive rows, for every file that holds some of them."""
    for file_number in range(FILES):
        begin, end = ((row - file_number + FILES - 1) // FILES for row in (rows.start, rows.stop))
        if begin < end:
            yield file_number, range(begin, end)


def shared_folder(folder: str, number: int) -> str:
    """The folder of the files of range `number` of the rows that a fork shares with other runs."""
    return str(Path(folder) / f"shared-{number}")


def rows_in_files(folder: str, width: int) -> int:
    """The number of rows of `width` bytes for which the files in a folder have space, 0 if there are none."""
    sizes = [os.path.getsize(path) for path in paths(folder) if os.path.exists(path)]
    return FILES * -(-max(sizes, default=0) // width) if width else 0


def have_links(folder: str) -> bool:
    """Whether a fork has links to the files of rows in a folder."""
    first = next(iter(paths(folder)), "")  # the first file that is linked, see `sharing.link`
    return os.path.exists(first) and os.stat(first).st_nlink > 1


def make_row_folder(folder: str) -> None:
    """Make a folder of rows, unless it exists.

    Only this user can read the rows: they are what clients know, and may lie in a folder of all users, such as
    /dev/shm.
    """
    Path(folder).parent.mkdir(parents=True, exist_ok=True)
    Path(folder).mkdir(mode=0o700, exist_ok=True)


def make_files(folder: str, capacity: int, width: int) -> None:
    """Make sparse files for `capacity` rows of `width` bytes. Files of an interrupted run keep what they hold."""
    make_row_folder(folder)
    rows_in_file = {number: positions.stop for number, positions in positions_by_file(range(capacity))}
    for number, path in enumerate(paths(folder)):
        file = open_plain(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(file, max(rows_in_file.get(number, 0) * width, os.fstat(file).st_size))
        finally:
            os.close(file)


def remove_files(folder: str) -> None:
    """Remove the files of rows; the folder too, unless there is something else in it."""
    with suppress(OSError):
        for path in map(Path, paths(folder)):
            path.unlink(missing_ok=True)
        if folder:
            for shared in Path(folder).glob("shared-[0-9]*"):
                remove_files(str(shared))
            (Path(folder) / SHARED).unlink(missing_ok=True)
            Path(folder).rmdir()


def stored_dtype(leaf: Tensor, bfloat16: bool) -> torch.dtype:
    """leaf: of one client's state. Single numbers are never rounded: a count in bfloat16 would end at 256."""
    return torch.bfloat16 if bfloat16 and leaf.is_floating_point() and leaf.ndim else leaf.dtype


def width(leaves: Sequence[Tensor], bfloat16: bool) -> int:
    """The number of bytes of a row. leaves: those of one client's state."""
    return sum(leaf.numel() * stored_dtype(leaf, bfloat16).itemsize for leaf in leaves)

"""Clients' states in sparse files: a client's state is a row, its leaves one behind the other, as they lie in memory.

Rows lie in turn in several files, since a file system lets one writer at a time into a file: two workers that wrote 40
kB rows to one waited for each other ten times as long as they wrote. They are read and written, not mapped: a mapping
costs a page fault every 4 KiB, which came to several times the copying.
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

DIGEST = 16
"""Bytes of a row's digest, XXH3's of 128 bits: it finds damage, in a fortieth of the time of SHA-256, which took 8 % of
a round. Checkpoints' own files have SHA-256."""
FILES = 16
AT_ONCE = os.sysconf("SC_IOV_MAX")
"""Pieces of memory that one call reads or writes."""
Memory = Sequence[np.ndarray]
"""(bytes,) uint8 each."""


class StateLayout(NamedTuple):
    """Where the rows are; `folder` is "" where the method keeps no state."""

    folder: str
    capacity: int
    narrow: bool  # floats as bfloat16
    digests: bool  # whether writers say what they wrote


class RowFiles:
    """A process's view of the files."""

    def __init__(self, place: StateLayout, sample: Any) -> None:
        """sample: the state of one client, for shapes and dtypes."""
        leaves, self.spec = pytree.tree_flatten(sample)
        self.leaves = [(leaf, stored(leaf, place.narrow)) for leaf in leaves]
        self.width = width(leaves, place.narrow)
        self.files = [os.open(path, os.O_RDWR) for path in paths(place.folder)]

    def __del__(self) -> None:
        for file in getattr(self, "files", []):
            os.close(file)

    def read(self, rows: Tensor, fresh: Any) -> Any:
        """The states in `rows` (c,), stacked on a first axis; where a row is -1 it is `fresh`, one client's state."""
        columns = [torch.empty(len(rows), *leaf.shape, dtype=kind) for leaf, kind in self.leaves]
        known = rows >= 0
        self._transfer(os.preadv, zip(rows.tolist(), pieces(columns), strict=True))
        found = []
        for column, leaf in zip(columns, pytree.tree_leaves(fresh), strict=True):
            states = column.to(leaf.device, leaf.dtype)
            if not known.all():
                states[~known.to(leaf.device)] = leaf
            found.append(states)
        return pytree.tree_unflatten(found, self.spec)

    def write(self, rows: Tensor, states: Any) -> np.ndarray:
        """(c, DIGEST) bytes: of each row."""
        parts = list(pieces(self._plain(states)))
        self._transfer(os.pwritev, zip(rows.tolist(), parts, strict=True))
        return digests(parts)

    def read_one(self, row: int) -> Any:
        """The state in a row."""
        leaves = [torch.empty(leaf.shape, dtype=kind) for leaf, kind in self.leaves]
        self._transfer(os.preadv, [(row, [bare(leaf) for leaf in leaves])])
        found = [leaf.to(like.device, like.dtype) for leaf, (like, _) in zip(leaves, self.leaves, strict=True)]
        return pytree.tree_unflatten(found, self.spec)

    def write_one(self, row: int, state: Any) -> np.ndarray:
        """As `write` of a single one, without the first axis."""
        parts = [bare(leaf) for leaf in self._plain(state)]
        self._transfer(os.pwritev, [(row, parts)])
        return digests([parts])

    def _plain(self, state: Any) -> list[Tensor]:
        """Leaves as they are stored."""
        pairs = zip(pytree.tree_leaves(state), self.leaves, strict=True)
        return [leaf.to("cpu", kind).contiguous() for leaf, (_, kind) in pairs]

    def packed(self, rows: np.ndarray) -> np.ndarray:
        """(c, bytes of a row): as they are stored."""
        found = np.empty((len(rows), self.width), dtype=np.uint8)
        self._transfer(os.preadv, ((row, [data]) for row, data in zip(rows.tolist(), found, strict=True)))
        return found

    def unpack(self, rows: np.ndarray, packed: np.ndarray) -> None:
        """What another node's `packed` gave, into the same rows here."""
        self._transfer(os.pwritev, ((row, [data]) for row, data in zip(rows.tolist(), packed, strict=True)))

    def digests(self, rows: np.ndarray) -> np.ndarray:
        """(c, DIGEST) bytes: of each row as it is stored."""
        return np.concatenate([digests([]), *(digests([[self.packed(row)[0]]]) for row in rows[:, None])])

    def _transfer(self, call: Callable[..., int], rows: Iterable[tuple[int, Memory]]) -> None:
        """call: os.preadv or os.pwritev; rows: (row, memory it is read to or written from), nothing where it is -1."""
        for row, memory in rows:
            if row < 0:
                continue
            number, place = spot(row)
            done, left = 0, memory
            while done < self.width:
                moved = call(self.files[number], left[:AT_ONCE], place * self.width + done)
                if not moved:
                    raise OSError(f"row {row} of a clients' state ends after {done} of {self.width} bytes")
                done += moved
                left = rest(left, moved) if done < self.width else []


def digests(rows: Sequence[Memory]) -> np.ndarray:
    """(c, DIGEST) bytes: of each row, given as pieces."""
    found = []
    for row in rows:
        made = xxhash.xxh3_128()
        for piece in row:
            made.update(piece.data)
        found.append(made.digest())
    return np.frombuffer(b"".join(found), dtype=np.uint8).reshape(len(rows), DIGEST)


def bare(leaf: Tensor) -> np.ndarray:
    """Its memory."""
    return leaf.view(-1).view(torch.uint8).numpy()


def pieces(columns: Sequence[Tensor]) -> Iterator[Memory]:
    """Client by client, the memory of its part of every column."""
    return map(list, zip(*(bare(column).reshape(len(column), -1) for column in columns), strict=True))


def rest(memory: Memory, moved: int) -> Memory:
    """What of it is left after `moved` bytes."""
    left = []
    for part in memory:
        left.append(part[min(moved, len(part)) :])
        moved -= min(moved, len(part))
    return [part for part in left if len(part)]


# --- the files --------------------------------------------------------------------------------------------------------
def paths(folder: str) -> list[str]:
    """The files of a folder of rows; an empty list where `folder` is "": the method's clients keep nothing."""
    if not folder:
        return []
    return [str(Path(folder) / f"rows{i:02}.bin") for i in range(FILES)]


def spot(row: int) -> tuple[int, int]:
    """(number of its file, number in it)."""
    return row % FILES, row // FILES


def runs(rows: range) -> Iterator[tuple[int, range]]:
    """Consecutive rows file by file: (number of the file, numbers in it)."""
    for number in range(FILES):
        begin, end = ((at - number + FILES - 1) // FILES for at in (rows.start, rows.stop))
        if begin < end:
            yield number, range(begin, end)


def make_files(folder: str, capacity: int, width: int) -> None:
    """The files, sparse; those of an interrupted run are taken up as they are."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    held = {number: inside.stop for number, inside in runs(range(capacity))}
    for number, path in enumerate(paths(folder)):
        Path(path).touch()
        os.truncate(path, max(held.get(number, 0) * width, os.path.getsize(path)))


def remove_files(folder: str) -> None:
    """Remove the files of rows; the folder too, unless there is something else in it."""
    with suppress(OSError):
        for path in map(Path, paths(folder)):
            path.unlink(missing_ok=True)
        if folder:
            Path(folder).rmdir()


def stored(leaf: Tensor, narrow: bool) -> torch.dtype:
    return torch.bfloat16 if narrow and leaf.is_floating_point() else leaf.dtype


def width(leaves: Sequence[Tensor], narrow: bool) -> int:
    """Bytes of a row."""
    return sum(leaf.numel() * stored(leaf, narrow).itemsize for leaf in leaves)

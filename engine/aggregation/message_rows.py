"""The messages of a round on the disk: a row for each client, in sparse files like those of client states.

A row consists of the bytes of the message's vectors, one leaf after another. The rows are temporary: no checkpoint has
them, and the next round overwrites them. Behind the rows of the cohort are further ones, for what Byzantine clients
send and for vectors that a rule looks at like messages.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import StoreFull
from ..state.row_files import PIECES_PER_CALL, locate, make_files, paths, positions_by_file, remove_files, skip_bytes
from .vectors import Span

EXTRA = 6
"""The number of rows for vectors that are no messages: the state of a rule, a trusted update, directions of an
attack."""


def capacity(cohort: int, attacked: bool) -> int:
    """The number of rows that a round with so many clients may need."""
    return cohort * (2 if attacked else 1) + EXTRA


class ReusedMemory:
    """Memory that one array after another uses. New memory for each of them would cost more time than to fill it."""

    def __init__(self) -> None:
        self.bytes = np.empty(0, dtype=np.uint8)

    def array(self, rows: int, columns: int, dtype: np.dtype) -> np.ndarray:
        """(rows, columns): an array with arbitrary content. The arrays before it are no longer valid."""
        size = rows * columns * dtype.itemsize
        if len(self.bytes) < size:
            self.bytes = np.empty(size, dtype=np.uint8)
        return self.bytes[:size].view(dtype).reshape(rows, columns)


class MessageRows:
    """The open files of messages, as one process uses them."""

    def __init__(self, folder: str, leaves: Sequence[Tensor]) -> None:
        """leaves: the vectors of a message, for their shapes and dtypes."""
        self.dtypes = [leaf.dtype for leaf in leaves]
        self.numpy_dtypes = [torch.empty(0, dtype=dtype).numpy().dtype for dtype in self.dtypes]
        sizes = [leaf.numel() * leaf.element_size() for leaf in leaves]
        self.offsets = [0, *np.cumsum(sizes).tolist()]
        self.width = self.offsets[-1]
        self.files = [os.open(path, os.O_RDWR) for path in paths(folder)]
        self.matrix, self.row = ReusedMemory(), ReusedMemory()  # of what was read last

    def __del__(self) -> None:
        for file in getattr(self, "files", []):
            os.close(file)

    def write(self, rows: Sequence[int], leaves: Sequence[Tensor]) -> None:
        """Write c messages. leaves: (c, …) each."""
        columns = [self._bytes(leaf, dtype, len(rows)) for leaf, dtype in zip(leaves, self.dtypes, strict=True)]
        for place, row in enumerate(rows):
            self.transfer(os.pwritev, row, 0, [column[place] for column in columns])

    @staticmethod
    def _bytes(leaf: Tensor, dtype: torch.dtype, count: int) -> np.ndarray:
        stored = leaf.detach().to("cpu", dtype).contiguous()
        return stored.view(-1).view(torch.uint8).numpy().reshape(count, -1)

    def read(self, rows: Sequence[int] | np.ndarray, span: Span) -> np.ndarray:
        """(c, n): the numbers of a span in c rows, in the leaf's dtype. They are valid until the next call."""
        found = self.matrix.array(len(rows), span.length, self.numpy_dtypes[span.leaf])
        for target, row in zip(found, rows, strict=True):
            self._read_row(target, int(row), span)
        return found

    def read_double(self, rows: Sequence[int] | np.ndarray, span: Span) -> np.ndarray:
        """(c, n) float64: the same numbers, valid until the next call."""
        found = self.matrix.array(len(rows), span.length, np.dtype(np.float64))
        for target, row in zip(found, self.each_row(rows, span), strict=True):
            target[:] = row
        return found

    def each_row(self, rows: Sequence[int] | np.ndarray, span: Span) -> Iterator[np.ndarray]:
        """(n,): the numbers of a span in one row after another, in the leaf's dtype. All rows come to lie in the same
        memory, which therefore stays in the processor's cache."""
        found = self.row.array(1, span.length, self.numpy_dtypes[span.leaf])[0]
        for row in rows:
            self._read_row(found, int(row), span)
            yield found

    def _read_row(self, target: np.ndarray, row: int, span: Span) -> None:
        offset = self.offsets[span.leaf] + span.begin * target.itemsize
        self.transfer(os.preadv, row, offset, [target.view(np.uint8)])

    def write_span(self, row: int, span: Span, values: np.ndarray) -> None:
        """Write the numbers of a span, (n,), into one row."""
        stored = np.ascontiguousarray(values, dtype=self.numpy_dtypes[span.leaf])
        self.transfer(os.pwritev, row, self.offsets[span.leaf] + span.begin * stored.itemsize, [stored.view(np.uint8)])

    def write_spans(self, row: int, spans: Sequence[Span], values: Sequence[Tensor]) -> None:
        """Write a vector into one row. values: of each span."""
        for span, part in zip(spans, values, strict=True):
            self.write_span(row, span, part.numpy())

    def transfer(self, call: Any, row: int, offset: int, memory: Sequence[np.ndarray]) -> None:
        """Read or write a part of a row. call: os.preadv or os.pwritev. offset: in the row, in bytes."""
        number, position = locate(row)
        left, begin = memory, position * self.width + offset
        while left:
            pieces = left[:PIECES_PER_CALL]
            moved = call(self.files[number], pieces, begin)
            if moved == sum(map(len, pieces)):
                left = left[PIECES_PER_CALL:]
            elif moved:
                left = skip_bytes(left, moved)
            else:
                raise OSError(f"row {row} of the messages ends early")
            begin += moved


def make_rows(folder: str, count: int, width: int, clients: int, called: str) -> None:
    """Make the files for `count` rows of `width` bytes, and reserve their space on the disk. Raises StoreFull.

    clients: of a round, for the message. called: the rule or the attack that reads the messages.
    """
    try:
        make_files(folder, count, width)
        files = paths(folder)
        for number, positions in positions_by_file(range(count)):
            if width:
                with open(files[number], "r+b") as file:
                    os.posix_fallocate(file.fileno(), 0, positions.stop * width)
    except OSError as error:
        free = shutil.disk_usage(folder).free
        remove_files(folder)
        raise StoreFull(
            f"aggregate: {called} reads the messages of a round at once, {clients} of {width:,} bytes; their files "
            f"take {count * width:,} bytes, and {folder} has {free:,} bytes free ({error.strerror}); lower "
            "federation.cohort, use norm_clipping or sign_vote, or set engine.store to a larger disk"
        ) from error


def read_rows(folder: str, rows: np.ndarray, width: int) -> np.ndarray:
    """(c, width) uint8: the bytes of some rows, for another node. width: bytes of a row."""
    found = np.empty((len(rows), width), dtype=np.uint8)
    _move(os.preadv, folder, rows, found)
    return found


def write_rows(folder: str, rows: np.ndarray, packed: np.ndarray) -> int:
    """Write what `read_rows` returned on another node. Returns the number of bytes."""
    _move(os.pwritev, folder, rows, np.array(packed))
    return packed.nbytes


def _move(call: Any, folder: str, rows: np.ndarray, memory: np.ndarray) -> None:
    files = MessageRows(folder, [torch.empty(memory.shape[1], dtype=torch.uint8)])
    for row, data in zip(rows.tolist(), memory, strict=True):
        files.transfer(call, row, 0, [data])

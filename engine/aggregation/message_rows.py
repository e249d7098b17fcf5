"""The vectors of a message, on which rules of aggregation act, and the messages of a round as rows of files.

A row consists of the bytes of the message's vectors, one leaf after another, in sparse files like those of client
states. The rows are temporary: no checkpoint has them, and the next round overwrites them. Behind the rows of the
cohort are further ones, for what Byzantine clients send and for vectors that a rule looks at like messages.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ...algorithms.aggregation.contract import Vectors
from ...algorithms.contract import Message
from ...algorithms.tree import Tree
from ..errors import StoreFull
from ..state.row_files import PIECES_PER_CALL, make_files, paths, positions_by_file, remove_files, skip_bytes
from ..storage.atomic_write import allocate

PARTS = ("delta", "sent", "averaged", "norm2")
"""The fields of a message whose leaves are vectors."""


EXTRA = 6
"""The number of rows for vectors that are no messages: the state of a rule, a trusted update, directions of an
attack."""


class Span(NamedTuple):
    """Consecutive numbers of one leaf of a message."""

    leaf: int
    begin: int
    end: int

    @property
    def length(self) -> int:
        return self.end - self.begin


class Vector(NamedTuple):
    """One vector of a message, on which a rule decides, with what else of the message gets the rule's weights.

    For example, SCAFFOLD's messages have two leaves, the displacement (0) and the change of the control variates (1).
    Of 100 numbers of the model let the last 6 be running statistics. A rule with `vectors: joint` looks at the
    displacements alone, and decides for everything. Then a message has this vector only:

        Vector("delta", spans=(Span(0, 0, 94),), follows=(Span(1, 0, 94),), uniform={1}, statistics=(Span(0, 94, 100),))

    name: for messages to the user. spans: the numbers on which the rule decides, one span after another. follows:
    further numbers that get the same weights. weighted: whether the federation's client weights count. uniform: the
    leaves among all these for which they do not count: they get what the rule decides with equal client weights.
    statistics: running statistics, which get the weights only as far as these make a mean, see
    `rule.statistics_weights`.
    """

    name: str
    spans: tuple[Span, ...]
    follows: tuple[Span, ...] = ()
    weighted: bool = True
    uniform: frozenset[int] = frozenset()
    statistics: tuple[Span, ...] = ()

    @property
    def length(self) -> int:
        """P."""
        return sum(span.length for span in self.spans)


def vector_leaves(message: Message) -> list[Tensor]:
    """The leaves of a message that are vectors, in order: all but its facts."""
    return [leaf for part in PARTS for leaf in pytree.tree_leaves(getattr(message, part))]


def with_vector_leaves(message: Message, leaves: Sequence[Any]) -> Message:
    """The message with other leaves in the place of its vectors."""
    rest = iter(leaves)
    changed = {part: pytree.tree_map(lambda _: next(rest), getattr(message, part)) for part in PARTS}
    return message._replace(**changed)


def vectors_of(message: Message, how: Vectors, buffers: int) -> list[Vector]:
    """The vectors of a message. buffers: the number of tensors at the end of `delta` that are running statistics."""
    found: list[Vector] = []
    leaf = 0
    for part in PARTS:
        trees = pytree.tree_leaves(getattr(message, part), is_leaf=lambda node: isinstance(node, Tree))
        for tree in trees:
            name = part if part == "delta" else f"{part}{len(found)}"
            if part == "delta" and isinstance(tree, Tree):
                found += _of_displacement(tree, leaf, buffers)
            else:
                size = (tree.flat if isinstance(tree, Tree) else tree).numel()
                found.append(Vector(name, (Span(leaf, 0, size),), weighted=part != "sent"))
            leaf += 1
    if how == "each" or not found:
        return found
    first = [vector for vector in found if vector.name.startswith("delta")] or found[:1]
    name, decide, rest = "delta", first, [vector for vector in found if vector not in first]
    if how == "joined":
        name, decide, rest = "all", found, []
    weighted = any(vector.weighted for vector in found)
    uniform = frozenset(span.leaf for vector in found for span in vector.spans if not vector.weighted)
    spans, follows = (tuple(span for vector in part for span in vector.spans) for part in (decide, rest))
    statistics = tuple(span for vector in found for span in vector.statistics)
    return [Vector(name, spans, follows, weighted, uniform if weighted else frozenset(), statistics)]


def _of_displacement(tree: Tree, leaf: int, buffers: int) -> list[Vector]:
    """The vectors of `delta`: one, or one for each group of a min-max problem."""
    names, sizes = tree.layout.names, tree.layout.sizes
    ends = np.cumsum([0, *sizes])
    last = len(names) - buffers
    statistics = (Span(leaf, int(ends[last]), int(ends[-1])),) if buffers else ()
    primal: list[Span] = []
    dual: list[Span] = []
    for number in range(last):
        group = dual if names[number].startswith("dual.") else primal
        begin, end = int(ends[number]), int(ends[number + 1])
        if group and group[-1].end == begin:
            group[-1] = group[-1]._replace(end=end)
        else:
            group.append(Span(leaf, begin, end))
    if not dual or not primal:
        return [Vector("delta", tuple(primal or dual), statistics=statistics)]
    return [Vector("delta", tuple(primal), statistics=statistics), Vector("delta.dual", tuple(dual))]


def spans_of(vectors: Sequence[Vector], leaves: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], ...]:
    """For each vector the numbers of its spans, and of those that follow. leaves: of a message, flat."""
    spans = [(*vector.spans, *vector.follows) for vector in vectors]
    return tuple(tuple(leaves[span.leaf][span.begin : span.end].clone() for span in each) for each in spans)


def shaped(flat: Sequence[Tensor], samples: Sequence[Tensor]) -> list[Tensor]:
    """Flat leaves in the shapes and dtypes, and on the devices, of the samples."""
    return [leaf.view(sample.shape).to(sample.device, sample.dtype) for leaf, sample in zip(flat, samples, strict=True)]


def grouped(norms2: np.ndarray, single: Sequence[Vector], vectors: Sequence[Vector]) -> tuple[np.ndarray, np.ndarray]:
    """((S, V) the squared norms of vectors that consist of the single ones; (S, V) bool: whether these are finite, and
    those of what follows the vectors). norms2: (S, V') of the single ones."""
    found, sound = [], []
    for vector in vectors:
        own, all_of_it = set(vector.spans), {*vector.spans, *vector.follows}
        found.append(norms2[:, [i for i, one in enumerate(single) if set(one.spans) <= own]].sum(axis=1))
        parts = norms2[:, [i for i, one in enumerate(single) if set(one.spans) <= all_of_it]]
        sound.append(np.isfinite(parts).all(axis=1) & np.isfinite(found[-1]))
    return np.stack(found, axis=1), np.stack(sound, axis=1)


# --- rows of files ----------------------------------------------------------------------------------------------------
def capacity(cohort: int, attacked: bool) -> int:
    """The number of rows that a round with so many clients may need."""
    return cohort * (2 if attacked else 1) + EXTRA


class MessageFiles:
    """The open files of messages, as one process uses them."""

    def __init__(self, folder: str, leaves: Sequence[Tensor]) -> None:
        """leaves: the vectors of a message, for their shapes and dtypes."""
        self.dtypes = [leaf.dtype for leaf in leaves]
        self.numpy_dtypes = [torch.empty(0, dtype=dtype).numpy().dtype for dtype in self.dtypes]
        sizes = [leaf.numel() * leaf.element_size() for leaf in leaves]
        self.offsets = [0, *np.cumsum(sizes).tolist()]
        self.width = self.offsets[-1]
        self.files = [os.open(path, os.O_RDWR) for path in paths(folder)]
        self.memory: dict[str, np.ndarray] = {}  # of the matrix, and of the row, that was read last

    def __del__(self) -> None:
        for file in getattr(self, "files", []):
            os.close(file)

    def write(self, rows: Sequence[int], leaves: Sequence[Tensor]) -> None:
        """Write c messages. leaves: (c, …) each."""
        columns = [self._bytes(leaf, dtype, len(rows)) for leaf, dtype in zip(leaves, self.dtypes, strict=True)]
        for place, row in enumerate(rows):
            self.transfer(os.pwritev, row, 0, [column[place] for column in columns])

    def _reused(self, name: str, rows: int, columns: int, dtype: np.dtype) -> np.ndarray:
        """(rows, columns): an array with arbitrary content, in the memory of the last one of this name, which is no
        longer valid. New memory for each of them would cost more time than to fill it."""
        size = rows * columns * dtype.itemsize
        if name not in self.memory or len(self.memory[name]) < size:
            self.memory[name] = np.empty(size, dtype=np.uint8)
        return self.memory[name][:size].view(dtype).reshape(rows, columns)

    @staticmethod
    def _bytes(leaf: Tensor, dtype: torch.dtype, count: int) -> np.ndarray:
        stored = leaf.detach().to("cpu", dtype).contiguous()
        return stored.view(-1).view(torch.uint8).numpy().reshape(count, -1)

    def read(self, rows: Sequence[int] | np.ndarray, span: Span) -> np.ndarray:
        """(c, n): the numbers of a span in c rows, in the leaf's dtype. They are valid until the next call."""
        found = self._reused("matrix", len(rows), span.length, self.numpy_dtypes[span.leaf])
        for target, row in zip(found, rows, strict=True):
            self._read_row(target, int(row), span)
        return found

    def read_double(self, rows: Sequence[int] | np.ndarray, span: Span) -> np.ndarray:
        """(c, n) float64: the same numbers, valid until the next call."""
        found = self._reused("matrix", len(rows), span.length, np.dtype(np.float64))
        for target, row in zip(found, self.each_row(rows, span), strict=True):
            target[:] = row
        return found

    def each_row(self, rows: Sequence[int] | np.ndarray, span: Span) -> Iterator[np.ndarray]:
        """(n,): the numbers of a span in one row after another, in the leaf's dtype. All rows come to lie in the same
        memory, which therefore stays in the processor's cache."""
        found = self._reused("row", 1, span.length, self.numpy_dtypes[span.leaf])[0]
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
        position, number = divmod(row, len(self.files))  # as `row_files.locate` says
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
                    allocate(file.fileno(), 0, positions.stop * width)
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
    files = MessageFiles(folder, [torch.empty(memory.shape[1], dtype=torch.uint8)])
    for row, data in zip(rows.tolist(), memory, strict=True):
        files.transfer(call, row, 0, [data])

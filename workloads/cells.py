"""Cells of a data set's columns: read from Parquet files as arrays, and checked.

A cell that is missing, not a number, infinite or too large for float32 would become a model without meaning many rounds
later. Here it is refused when the data are read, with the column, the number of such rows and the first one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

FLOAT32 = float(np.finfo(np.float32).max)
CHUNK = 1 << 16
"""Rows that are checked at once: the masks of a large column would need as much memory as the column."""
REMEDY = "correct or remove these rows"

NULL = "without a value"
NOT_FINITE = "with NaN or infinity"
TOO_LARGE = "with numbers too large for float32"
NOT_WHOLE = "with numbers that are not whole"


class Faults:
    """Rows of one column that cannot be used, by what is wrong with them."""

    def __init__(self) -> None:
        self.found: dict[str, tuple[int, int]] = {}  # what is wrong -> (rows, the first one)

    def add(self, what: str, bad: np.ndarray, first: int = 0) -> None:
        """bad: (n,) bool, or (n, …) of which a row is bad where any entry is; first: the number of its first row."""
        rows = np.flatnonzero(bad.reshape(len(bad), -1).any(1)) if bad.size else np.zeros(0, dtype=np.int64)
        if len(rows):
            count, begin = self.found.get(what, (0, int(rows[0]) + first))
            self.found[what] = count + len(rows), min(begin, int(rows[0]) + first)

    def check(self, where: object, wants: str, column: str) -> None:
        """Raise ValueError if there are any. where: a file or a part of the data; wants: what it must have."""
        for what, (count, row) in self.found.items():
            rows = "1 row" if count == 1 else f"{count:,} rows"
            raise ValueError(
                f"{where} must have {wants} in every row of column {column}, got {rows} {what}, "
                f"the first is row {row} (from 0); {REMEDY}"
            )


def unusable(values: np.ndarray, faults: Faults, first: int = 0, most: float = FLOAT32) -> None:
    """Add the rows of (n, …) numbers that are NaN, infinite or, in float64, larger than `most`."""
    if values.dtype.kind != "f":
        return
    for begin in range(0, len(values), CHUNK):
        some = values[begin : begin + CHUNK]
        finite = np.isfinite(some)
        if not finite.all():
            faults.add(NOT_FINITE, ~finite, first + begin)
        if some.dtype.itemsize > 4 and most < np.inf:
            with np.errstate(invalid="ignore"):
                faults.add(TOO_LARGE, finite & (np.abs(some) > most), first + begin)


def check_finite(values: np.ndarray, where: str, column: str, most: float = FLOAT32) -> None:
    """Raise ValueError unless the (n, …) numbers are finite and no larger than `most`."""
    faults = Faults()
    unusable(values, faults, most=most)
    faults.check(where, "finite numbers", column)


def whole(values: np.ndarray, faults: Faults, first: int = 0) -> np.ndarray:
    """(n,) int64 of numbers of any type; adds the rows that hold none."""
    if values.dtype.kind == "f":
        finite = np.isfinite(values)
        faults.add(NOT_FINITE, ~finite, first)
        values = np.where(finite, values, 0)
        faults.add(NOT_WHOLE, values != np.rint(values), first)
    return values.astype(np.int64)


def labels_of(values: np.ndarray, classes: int, where: str, column: str = "label") -> np.ndarray:
    """(n,) int64 labels of a data set, 0 … classes - 1; ValueError otherwise."""
    values = np.asarray(values)
    if values.ndim != 1 or values.dtype.kind not in "iufb":
        raise ValueError(
            f"{where} must have one whole number a row in column {column}, got {values.dtype} of shape {values.shape}"
        )
    faults = Faults()
    labels = whole(values, faults)
    faults.add(f"outside 0 … {classes - 1}", (labels < 0) | (labels >= classes))
    faults.check(where, f"labels 0 … {classes - 1}", column)
    return labels


# --- Parquet ----------------------------------------------------------------------------------------------------------
class Column(ABC):
    """What is made of one column, some rows at a time. `wants`: what it must hold, for messages."""

    wants: str
    total = 0
    """Rows of all files, known before the first ones come."""

    def __init__(self, name: str) -> None:
        self.name, self.faults = name, Faults()

    @abstractmethod
    def add(self, cells: Any, first: int, where: Path) -> None:
        """cells: an Arrow array without nulls, the rows from `first` on of the file `where`."""

    @abstractmethod
    def whole(self) -> Any:
        """All rows of all files."""


class Labels(Column):
    wants = "whole numbers"

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.parts: list[np.ndarray] = []

    def add(self, cells: Any, first: int, where: Path) -> None:
        if not is_number(cells.type):
            raise ValueError(f"{where} must have whole numbers in column {self.name}, got {cells.type}")
        self.parts.append(whole(as_numpy(cells), self.faults, first))

    def whole(self) -> np.ndarray:
        """(n,) int64"""
        return np.concatenate(self.parts)


class Marks(Column):
    """Rows that are marked, as test rows or as held out: true or 1, or one of the words `yes` ("test")."""

    wants = "marks"

    def __init__(self, name: str, yes: Sequence[str], no: Sequence[str]) -> None:
        super().__init__(name)
        self.yes, self.no, self.parts = yes, no, []

    def add(self, cells: Any, first: int, where: Path) -> None:
        known = {**dict.fromkeys((*self.yes, True), True), **dict.fromkeys((*self.no, False), False)}
        distinct = cells.dictionary_encode()
        values = [value.lower() if isinstance(value, str) else value for value in distinct.dictionary.to_pylist()]
        if strange := [value for value in values if value not in known]:
            raise ValueError(
                f"{where} must have {', '.join(self.yes)} or {', '.join(self.no)}, true or false, in column "
                f"{self.name}, got {strange[0]!r}"
            )
        self.parts.append(np.array([known[value] for value in values], dtype=bool)[as_numpy(distinct.indices)])

    def whole(self) -> np.ndarray:
        """(n,) bool"""
        return np.concatenate(self.parts)


class Clients(Column):
    wants = "a client"

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.names: dict[str, int] = {}
        self.parts: list[np.ndarray] = []

    def add(self, cells: Any, first: int, where: Path) -> None:
        distinct = cells.dictionary_encode()
        if str(distinct.type.value_type) in ("halffloat", "float", "double"):
            self.faults.add(NOT_FINITE, ~np.isfinite(as_numpy(cells)), first)
        numbers = [self.names.setdefault(str(one), len(self.names)) for one in distinct.dictionary.to_pylist()]
        self.parts.append(np.array(numbers, dtype=np.int64)[as_numpy(distinct.indices)])

    def whole(self) -> np.ndarray:
        """(n,) int64, numbers in the alphabetical order of the clients' names."""
        order = np.empty(len(self.names), dtype=np.int64)
        order[np.argsort(np.asarray(list(self.names)), kind="stable")] = np.arange(len(self.names))
        return order[np.concatenate(self.parts)]


class Texts(Column):
    wants = "texts"

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.parts: list[str] = []

    def add(self, cells: Any, first: int, where: Path) -> None:
        if str(cells.type) not in ("string", "large_string", "string_view"):
            raise ValueError(f"{where} must have texts in column {self.name}, got {cells.type}")
        self.parts.extend(cells.to_pylist())

    def whole(self) -> list[str]:
        return self.parts


class Inputs(Column):
    """Numbers, lists of numbers however nested, or encoded pictures, as arrays of `shape`: bytes (uint8) and pictures
    stay bytes, all else becomes float32.

    Lists may be flat, or nested as `shape` is. Images whose channels come last are turned, so that channels come first.
    """

    wants = "finite numbers"

    def __init__(self, name: str, shape: tuple[int, ...], decode: Callable[..., np.ndarray]) -> None:
        """decode: (encoded pictures, shape, where, number of the first) -> (n, *shape) bytes."""
        super().__init__(name)
        self.shape, self.decode = shape, decode
        self.out: np.ndarray | None = None  # of all rows at once: twice a large set may not fit into the memory
        self.at = 0

    def add(self, cells: Any, first: int, where: Path) -> None:
        encoded = pictures_in(cells)
        if encoded is not None:
            if len(self.shape) != 3 or self.shape[0] not in (1, 3):
                raise ValueError(f"pictures need shape (1 or 3, height, width), got shape={self.shape}")
            missing = nulls(encoded)
            self.faults.add("whose picture has no bytes", missing, first)
            if not missing.any():
                self._keep(self.decode(encoded.to_pylist(), self.shape, where, first), where)
            return
        values, dims = self._numbers(cells, first, where)
        self._keep(self._laid_out(values, dims, where), where)

    def _keep(self, rows: np.ndarray, where: Path) -> None:
        if self.out is None:
            self.out = np.empty((self.total, *self.shape), dtype=rows.dtype)
        if self.out.dtype != rows.dtype:
            raise ValueError(
                f"{where} must have numbers of one type in column {self.name}, got {rows.dtype} after "
                f"{self.out.dtype}: bytes are scaled to [0, 1], other numbers are not"
            )
        self.out[self.at : self.at + len(rows)] = rows
        self.at += len(rows)

    def _numbers(self, cells: Any, first: int, where: Path) -> tuple[np.ndarray, list[int]]:
        """(values of all rows end to end, lengths of the lists at each level)."""
        rows, dims = len(cells), []
        while not is_number(cells.type):
            cells, lengths = self._opened(cells, where)
            if len(lengths) and (lengths != lengths[0]).any():
                at = int(np.flatnonzero(lengths != lengths[0])[0])
                raise ValueError(
                    f"{where} must have lists of equal length in column {self.name}, got one of {lengths[at]} numbers "
                    f"in row {first + at // prod(dims)} (from 0) where others have {lengths[0]}"
                )
            dims += [int(lengths[0])] if len(lengths) else []
            missing = nulls(cells)
            if missing.any():
                self.faults.add(NULL, missing.reshape(rows, -1), first)
                # The fault is told at the end of the file; until then any number stands for what is missing.
                return np.zeros(rows * prod(self.shape), np.float32), [prod(self.shape)]
        values = as_numpy(cells)
        if values.dtype != np.uint8:
            unusable(values.reshape(rows, -1), self.faults, first)
            with np.errstate(over="ignore", invalid="ignore"):
                values = values.astype(np.float32)
        return values, dims

    def _opened(self, cells: Any, where: Path) -> tuple[Any, np.ndarray]:
        """(what the lists hold, end to end; their lengths); no lengths where the cells are no lists, but stored so."""
        import pyarrow as pa

        kind, none = cells.type, np.zeros(0, dtype=np.int64)
        if isinstance(kind, pa.BaseExtensionType):
            return cells.storage, none
        if pa.types.is_dictionary(kind):
            return cells.dictionary_decode(), none
        if pa.types.is_fixed_size_list(kind):
            return cells.flatten(), np.full(len(cells), kind.list_size)
        if pa.types.is_list(kind) or pa.types.is_large_list(kind):
            return cells.flatten(), np.asarray(cells.value_lengths().to_numpy(zero_copy_only=False))
        raise ValueError(f"{where} must have numbers, lists of numbers or pictures in column {self.name}, got {kind}")

    def _laid_out(self, values: np.ndarray, dims: list[int], where: Path) -> np.ndarray:
        """(n, *shape)"""
        wide, shape = [d for d in dims if d != 1], [d for d in self.shape if d != 1]
        if wide == shape or (len(wide) <= 1 and prod(dims) == prod(self.shape)):
            return values.reshape(-1, *self.shape)
        if len(self.shape) > 1 and dims == [*self.shape[1:], self.shape[0]]:
            return np.ascontiguousarray(np.moveaxis(values.reshape(-1, *dims), -1, 1))
        got = " x ".join(map(str, dims)) if dims else "1"
        raise ValueError(
            f"{where} must have {' x '.join(map(str, self.shape))} numbers in every row of column {self.name}, got "
            f"{got}; set workload.shape"
        )

    def whole(self) -> np.ndarray:
        """(n, *shape)"""
        assert self.out is not None  # `read_columns` refuses files without rows
        return self.out


class Feature(Inputs):
    """One of several columns that make an input together: numbers as they are, bytes too."""

    def _keep(self, rows: np.ndarray, where: Path) -> None:
        super()._keep(rows.astype(np.float32), where)


def is_number(kind: Any) -> bool:
    import pyarrow as pa

    types = pa.types
    return types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind) or types.is_decimal(kind)


def as_numpy(cells: Any) -> np.ndarray:
    """Arrow numbers without nulls; decimals as float64."""
    import pyarrow as pa

    if pa.types.is_decimal(cells.type):
        cells = cells.cast(pa.float64())
    return np.asarray(cells.to_numpy(zero_copy_only=False))


def nulls(cells: Any) -> np.ndarray:
    """(n,) bool"""
    if not cells.null_count:
        return np.zeros(len(cells), dtype=bool)
    return np.asarray(cells.is_null().to_numpy(zero_copy_only=False))


def pictures_in(cells: Any) -> Any:
    """The encoded pictures of a column of bytes, or of structs as Hugging Face has them, {bytes, path}; else None."""
    import pyarrow as pa

    kind = cells.type
    if pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
        cells = cells.field("bytes")
        kind = cells.type
    return cells if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) else None


def runs(mask: np.ndarray) -> list[tuple[int, int]]:
    """[begin, end) of each run of true in (n,) bool."""
    edges = np.flatnonzero(np.diff(mask, prepend=False, append=False))
    return [(int(begin), int(end)) for begin, end in edges.reshape(-1, 2)]


def read_columns(
    paths: Sequence[Path], columns: Sequence[Column], batches: Callable[..., Any], sizes: Sequence[int], rows: int
) -> list[Any]:
    """What each column makes of all rows of the files, some `rows` at a time, so that a file is never in memory whole.

    batches: (path, names, rows) -> Arrow record batches; sizes: rows of each file. Raises ValueError where cells are
    missing or unusable.
    """
    if not sum(sizes):
        raise ValueError(f"{paths[0]} must have rows, got none; fetch it again")
    for column in columns:
        column.total = sum(sizes)
    for path in paths:
        first = 0
        for batch in batches(path, list(dict.fromkeys(column.name for column in columns)), rows):
            for column in columns:
                cells = batch[column.name]
                missing = nulls(cells)
                column.faults.add(NULL, missing, first)
                for begin, end in runs(~missing):
                    column.add(cells.slice(begin, end - begin), first + begin, path)
            first += len(batch)
        for column in columns:
            column.faults.check(path, column.wants, column.name)
    return [column.whole() for column in columns]

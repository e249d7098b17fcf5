"""Reads the columns of Parquet files into arrays and checks every cell.

A cell that is missing, not a number, infinite or too large for float32 would make the model meaningless many rounds
later. Here it is refused when the data are read; the message has the column, the number of such rows and the first one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from decimal import Decimal
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

FLOAT32 = float(np.finfo(np.float32).max)
CHUNK = 1 << 16
"""Rows that are checked together. The masks of all rows of a large column would need as much memory as the column."""
REMEDY = "correct or remove these rows"

NULL = "without a value"
NOT_FINITE = "with NaN or infinity"
TOO_LARGE = "with numbers too large for float32"
NOT_WHOLE = "with numbers that are not whole"


class Faults:
    """The unusable rows of one column, counted by what is wrong with them."""

    def __init__(self) -> None:
        self.found: dict[str, tuple[int, int]] = {}  # what is wrong -> (number of rows, the first row)

    def add(self, what: str, bad: np.ndarray, first: int = 0) -> None:
        """Count the bad rows. bad: bool, (n,) or (n, …); a row is bad if any of its entries is. first: the row number
        of bad[0]."""
        rows = np.flatnonzero(bad.reshape(len(bad), -1).any(1)) if bad.size else np.zeros(0, dtype=np.int64)
        if len(rows):
            count, begin = self.found.get(what, (0, int(rows[0]) + first))
            self.found[what] = count + len(rows), min(begin, int(rows[0]) + first)

    def check(self, where: object, wants: str, column: str) -> None:
        """Raise ValueError if bad rows were counted. For the message: `where` is the file or part of the data, `wants`
        what every row must have, `column` the name of the column."""
        for what, (count, row) in self.found.items():
            rows = "1 row" if count == 1 else f"{count:,} rows"
            raise ValueError(
                f"{where} must have {wants} in every row of column {column}, got {rows} {what}, "
                f"the first is row {row} (from 0); {REMEDY}"
            )


def unusable(values: np.ndarray, faults: Faults, first: int = 0, most: float = FLOAT32) -> None:
    """Add to `faults` the rows of values, (n, …), with a number that is NaN, infinite or, in float64, larger than
    `most` in magnitude. first: the row number of values[0]."""
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
    """Raise ValueError unless all numbers of values, (n, …), are finite and their magnitudes are at most `most`."""
    faults = Faults()
    unusable(values, faults, most=most)
    faults.check(where, "finite numbers", column)


def whole(values: np.ndarray, faults: Faults, first: int = 0) -> np.ndarray:
    """values, (n,) numbers of any type, as int64. Rows that hold no whole number are added to `faults`."""
    if values.dtype.kind == "f":
        finite = np.isfinite(values)
        faults.add(NOT_FINITE, ~finite, first)
        values = np.where(finite, values, 0)
        faults.add(NOT_WHOLE, values != np.rint(values), first)
    return values.astype(np.int64)


def number_the_classes(label: Any) -> str:
    """The remedy for labels that are texts; "" for other labels. label: one of them."""
    if not isinstance(label, str):
        return ""
    return (
        f" such as {label[:40]!r}; number the classes, in all files alike: names = sorted(set(labels)), and "
        "names.index(label) in the place of each label"
    )


def labels_of(values: np.ndarray, classes: int, where: str, column: str = "label") -> np.ndarray:
    """values as labels, (n,) int64. Raises ValueError unless all of them are whole numbers from 0 to classes - 1."""
    values = np.asarray(values)
    if values.ndim != 1 or values.dtype.kind not in "iufb":
        raise ValueError(
            f"{where} must have one whole number per row in column {column}, got {values.dtype} of shape "
            f"{values.shape}{number_the_classes(next(iter(values.flat), None))}"
        )
    faults = Faults()
    labels = whole(values, faults)
    faults.add(f"outside 0 … {classes - 1}", (labels < 0) | (labels >= classes))
    faults.check(where, f"labels 0 … {classes - 1}", column)
    return labels


# --- Parquet ----------------------------------------------------------------------------------------------------------
class Column(ABC):
    """Reads one column of Parquet files, some rows at a time."""

    wants: str
    """What every row must hold, for messages."""
    total = 0
    """The number of rows of all files, or a guess; set before the first call of `add`."""

    def __init__(self, name: str) -> None:
        self.name, self.faults = name, Faults()

    @property
    def names(self) -> tuple[str, ...]:
        """The columns of the files that are read."""
        return (self.name,)

    def take(self, batch: Any, first: int, where: Path) -> None:
        """Take an Arrow record batch, the rows of the file `where` from number `first` on."""
        cells = batch[self.name]
        missing = nulls(cells)
        self.faults.add(NULL, missing, first)
        for begin, end in runs(~missing):
            self.add(cells.slice(begin, end - begin), first + begin, where)

    def check(self, where: Path) -> None:
        """Raise ValueError if rows of the file `where` cannot be used."""
        self.faults.check(where, self.wants, self.name)

    @abstractmethod
    def add(self, cells: Any, first: int, where: Path) -> None:
        """Take some rows. cells: an Arrow array without nulls, the rows of the file `where` from number `first` on."""

    @abstractmethod
    def whole(self) -> Any:
        """The result: all rows of all files."""


class Labels(Column):
    """A column of whole numbers."""

    wants = "whole numbers"

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.parts: list[np.ndarray] = []

    def add(self, cells: Any, first: int, where: Path) -> None:
        if not is_number(cells.type):
            shown = next(iter(cells[:1].to_pylist()), "")
            raise ValueError(
                f"{where} must have whole numbers in column {self.name}, got {cells.type}{number_the_classes(shown)}"
            )
        self.parts.append(whole(as_numpy(cells), self.faults, first))

    def whole(self) -> np.ndarray:
        """(n,) int64"""
        return np.concatenate(self.parts)


class Marks(Column):
    """A column that marks rows, as test rows or as held out. A marked row has true, 1 or a word of `yes`; any other row
    has false, 0 or a word of `no`."""

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
    """A column of clients' names or numbers."""

    wants = "a client"

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.numbers: dict[str, int] = {}
        self.parts: list[np.ndarray] = []

    def add(self, cells: Any, first: int, where: Path) -> None:
        distinct = cells.dictionary_encode()
        if str(distinct.type.value_type) in ("halffloat", "float", "double"):
            self.faults.add(NOT_FINITE, ~np.isfinite(as_numpy(cells)), first)
        numbers = [self.numbers.setdefault(str(one), len(self.numbers)) for one in distinct.dictionary.to_pylist()]
        self.parts.append(np.array(numbers, dtype=np.int64)[as_numpy(distinct.indices)])

    def whole(self) -> np.ndarray:
        """(n,) int64: each row's client; clients are numbered in the alphabetical order of their names."""
        order = np.empty(len(self.numbers), dtype=np.int64)
        order[self._by_name()] = np.arange(len(self.numbers))
        return order[np.concatenate(self.parts)]

    def _by_name(self) -> np.ndarray:
        """(c,) the clients in the order of their names."""
        return np.argsort(np.asarray(list(self.numbers)), kind="stable")

    def sorted_names(self) -> list[str]:
        """The names of the clients by their numbers."""
        names = list(self.numbers)
        return [names[place] for place in self._by_name().tolist()]


class Texts(Column):
    """A column of texts."""

    wants = "texts"

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.parts: list[str] = []

    def add(self, cells: Any, first: int, where: Path) -> None:
        if str(cells.type) not in ("string", "large_string", "string_view"):
            raise ValueError(f"{where} must have texts in column {self.name}, got {cells.type}")
        self.parts.extend(cells.to_pylist())

    def whole(self) -> list[str]:
        """n texts"""
        return self.parts


class Inputs(Column):
    """A column of numbers, of (nested) lists of numbers, or of encoded pictures, each row as an array of `shape`.

    Unsigned bytes and pictures become uint8, other numbers and pictures with 16 bits float32. A list may be flat or
    nested as `shape` is; in an image whose channels come last, they are moved to the front.
    """

    wants = "finite numbers"

    def __init__(self, name: str, shape: tuple[int, ...] | None, decode: Callable[..., np.ndarray]) -> None:
        """shape: of one row; None for that of the first rows. decode: function (encoded pictures, shape, where, row
        number of the first one) -> (n, *shape), uint8, or float32 in [0, 1] for pictures with 16 bits."""
        super().__init__(name)
        self.shape, self.decode = shape, decode
        self.out: np.ndarray | None = None  # has space for all rows: two copies of a large set may not fit into memory
        self.at = 0

    def add(self, cells: Any, first: int, where: Path) -> None:
        encoded = pictures_in(cells)
        if encoded is not None:
            if self.shape is not None and (len(self.shape) != 3 or self.shape[0] not in (1, 3)):
                raise ValueError(f"pictures need shape (1 or 3, height, width), got shape={self.shape}")
            missing = nulls(encoded)
            self.faults.add("whose picture has no bytes", missing, first)
            if not missing.any():
                self._keep(self.decode(encoded.to_pylist(), self.shape, where, first), where)
            return
        values, dims = self._numbers(cells, first, where)
        if values is not None:
            self._keep(self._laid_out(values, dims, where), where)

    def _keep(self, rows: np.ndarray, where: Path) -> None:
        if self.out is None:
            self.shape = rows.shape[1:]
            self.out = np.empty((max(self.total, len(rows)), *self.shape), dtype=rows.dtype)
        if self.out.dtype != rows.dtype:
            raise ValueError(
                f"{where} must have numbers of one type in column {self.name}, got {rows.dtype} after "
                f"{self.out.dtype}: bytes are scaled to [0, 1], other numbers are not"
            )
        if self.at + len(rows) > len(self.out):
            self.out.resize((2 * len(self.out) + len(rows), *rows.shape[1:]), refcheck=False)
        self.out[self.at : self.at + len(rows)] = rows
        self.at += len(rows)

    def _numbers(self, cells: Any, first: int, where: Path) -> tuple[np.ndarray | None, list[int]]:
        """(the numbers of all rows in one array, the lengths of the lists at each level of nesting). There are no
        numbers if one is missing, which is raised at the end of the file."""
        import pyarrow as pa

        rows, dims = len(cells), []
        if self.shape is None and isinstance(cells.type, pa.FixedShapeTensorType):
            self.shape = tuple(cells.type.shape or ())
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
                return None, dims
        values = as_numpy(cells)
        if values.dtype != np.uint8:
            unusable(values.reshape(rows, -1), self.faults, first)
            with np.errstate(over="ignore", invalid="ignore"):
                values = values.astype(np.float32)
        return values, dims

    def _opened(self, cells: Any, where: Path) -> tuple[Any, np.ndarray]:
        """(the items of all lists in one array, the lengths of the lists). For extension and dictionary types: (the
        plain array, no lengths)."""
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
        """The numbers as an array (n, *shape). dims: lengths of the lists at each level."""
        if self.shape is None:
            return values.reshape(-1, *(dims or [1]))
        wide, shape = [d for d in dims if d != 1], [d for d in self.shape if d != 1]
        if wide == shape or (len(wide) <= 1 and prod(dims) == prod(self.shape)):
            return values.reshape(-1, *self.shape)
        if len(self.shape) > 1 and dims == [*self.shape[1:], self.shape[0]]:
            return np.ascontiguousarray(np.moveaxis(values.reshape(-1, *dims), -1, 1))
        got = " x ".join(map(str, dims)) if dims else "1"
        raise ValueError(
            f"{where} must have {' x '.join(map(str, self.shape))} numbers in every row of column {self.name}, got "
            f"{got}; make all rows alike, or set workload.reshape"
        )

    def whole(self) -> np.ndarray:
        """(n, *shape)"""
        assert self.out is not None  # `read_columns` refuses files without rows
        assert self.shape is not None
        if len(self.out) > self.at:
            self.out.resize((self.at, *self.shape), refcheck=False)
        return self.out


class Plain(Inputs):
    """A column whose numbers become float32; bytes are not scaled."""

    def _keep(self, rows: np.ndarray, where: Path) -> None:
        super()._keep(rows.astype(np.float32), where)


class Features(Column):
    """Several columns of one number each, which form a row. The numbers become float32; bytes are not scaled."""

    wants = "finite numbers"

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(names[0])
        self.columns = {name: Faults() for name in names}
        self.out = np.empty((0, len(names)), dtype=np.float32)
        self.at = 0

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.columns)

    def take(self, batch: Any, first: int, where: Path) -> None:
        rows = np.empty((len(batch), len(self.columns)), dtype=np.float64)
        for place, (name, faults) in enumerate(self.columns.items()):
            cells = batch[name]
            if not is_number(cells.type):
                raise ValueError(
                    f"{where} must have one number in every row of column {name}, got {cells.type}; {ONE_HOT}"
                )
            if cells.null_count:
                faults.add(NULL, nulls(cells), first)
            rows[:, place] = 0 if cells.null_count else as_numpy(cells)
        if not (np.abs(rows) <= FLOAT32).all():
            for place, faults in enumerate(self.columns.values()):
                unusable(rows[:, place], faults, first)
        if self.at + len(rows) > len(self.out):
            self.out.resize((max(self.total, 2 * len(self.out) + len(rows)), len(self.columns)), refcheck=False)
        with np.errstate(over="ignore", invalid="ignore"):
            self.out[self.at : self.at + len(rows)] = rows
        self.at += len(rows)

    def add(self, cells: Any, first: int, where: Path) -> None:
        """Never called: `take` reads all columns at once."""

    def check(self, where: Path) -> None:
        for name, faults in self.columns.items():
            faults.check(where, self.wants, name)

    def whole(self) -> np.ndarray:
        """(n, number of columns) float32"""
        self.out.resize((self.at, len(self.columns)), refcheck=False)
        return self.out


ONE_HOT = (
    "leave it out of workload.input, or make a column of 0 and 1 for each text: pandas.get_dummies(frame, dtype=int)"
)
"""The remedy for a column of texts among those of numbers."""


class ClassNames:
    """The names of classes, and their numbers in the order in which they were met.

    order: all names in their order; () for the order of `sorted_names`. by_number: the names of whole numbers, as
    Hugging Face's ClassLabel has them; () where a whole number is a name itself.
    """

    def __init__(self, order: Sequence[str], by_number: Sequence[str] = ()) -> None:
        self.order, self.by_number = tuple(order) or tuple(by_number), tuple(by_number)
        self.met: dict[str, int] = {}

    def numbers_of(self, values: Sequence[Any], where: object, column: str) -> np.ndarray:
        """(n,) int64: the number of each value, a text, a whole number or a mark. Raises ValueError for others."""
        names = [self._name(value, where, column) for value in values]
        return np.array([self.met.setdefault(name, len(self.met)) for name in names], dtype=np.int64)

    def _name(self, value: Any, where: object, column: str) -> str:
        if isinstance(value, bool):
            return str(value).lower()
        if isinstance(value, float | Decimal):
            if value != value // 1:
                raise ValueError(self._not_whole(value, where, column))
            value = int(value)
        if isinstance(value, int) and self.by_number:
            if not 0 <= value < len(self.by_number):
                raise ValueError(
                    f"{where} must have labels 0 … {len(self.by_number) - 1} in column {column}, got {value}; {REMEDY}"
                )
            return self.by_number[value]
        if not isinstance(value, str | int):
            got = type(value).__name__
            raise ValueError(f"{where} must have texts or whole numbers in column {column}, got {got}; {REMEDY}")
        if self.order and str(value) not in self.order:
            raise ValueError(
                f"{where} must have one of workload.class_names in column {column}, {', '.join(self.order)}, got "
                f"{str(value)[:40]!r}; add it to them"
            )
        return str(value)

    @staticmethod
    def _not_whole(value: Any, where: object, column: str) -> str:
        return (
            f"{where} must have classes in column {column}, texts or whole numbers, got {value}; set "
            "workload.task=regression to learn numbers"
        )

    def sorted_names(self, where: object, column: str) -> tuple[str, ...]:
        """The names in the order of the classes. Without `order`, whole numbers by size or else texts by letters."""
        if self.order:
            return self.order
        if all(name.lstrip("-").isdecimal() for name in self.met):
            return tuple(sorted(self.met, key=int))
        if all(is_float(name) for name in self.met):
            number = next(name for name in self.met if not name.lstrip("-").isdecimal())
            raise ValueError(self._not_whole(number, where, column))
        return tuple(sorted(self.met))

    def places(self, names: Sequence[str]) -> np.ndarray:
        """(number of names met,) int64: the place in `names` of each name, by its number."""
        at = {name: place for place, name in enumerate(names)}
        return np.array([at[name] for name in self.met], dtype=np.int64)


def is_float(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


class Named(Column):
    """A column of classes: texts, whole numbers or marks."""

    wants = "a class"

    def __init__(self, name: str, classes: ClassNames) -> None:
        super().__init__(name)
        self.classes = classes
        self.parts: list[np.ndarray] = []

    def add(self, cells: Any, first: int, where: Path) -> None:
        if is_number(cells.type):
            whole(as_numpy(cells), self.faults, first)  # counts the rows without a whole number
            if self.faults.found:
                return
        distinct = cells.dictionary_encode()
        numbers = self.classes.numbers_of(distinct.dictionary.to_pylist(), where, self.name)
        self.parts.append(numbers[as_numpy(distinct.indices)])

    def whole(self) -> np.ndarray:
        """(n,) int64: numbers of `classes.met`"""
        return np.concatenate(self.parts)


class NamedSeveral(Named):
    """A column of lists of classes, which may be empty."""

    wants = "a list of classes"
    rows = 0

    def add(self, cells: Any, first: int, where: Path) -> None:
        import pyarrow as pa

        if not (pa.types.is_list(cells.type) or pa.types.is_large_list(cells.type)):
            raise ValueError(
                f"{where} must have a list of classes in every row of column {self.name}, got {cells.type}; or name "
                "several columns of 0 and 1 in workload.label"
            )
        lengths = np.asarray(cells.value_lengths().to_numpy(zero_copy_only=False))
        distinct = cells.flatten().dictionary_encode()
        numbers = self.classes.numbers_of(distinct.dictionary.to_pylist(), where, self.name)
        rows = self.rows + np.repeat(np.arange(len(cells)), lengths)
        pairs = np.stack([rows, numbers[as_numpy(distinct.indices)]], 1)
        if len(np.unique(pairs, axis=0)) < len(pairs):
            raise ValueError(
                f"{where} must have different classes in each list of column {self.name}, got one twice; for marks 0 "
                "and 1, make lists of fixed size or name several columns in workload.label"
            )
        self.parts.append(pairs)
        self.rows += len(cells)

    def whole(self) -> np.ndarray:
        """(number of classes in all lists, 2) int64: row, and number of `classes.met`"""
        return super().whole()


def is_number(kind: Any) -> bool:
    """Whether an Arrow type is one of numbers or booleans."""
    import pyarrow as pa

    types = pa.types
    return types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind) or types.is_decimal(kind)


def as_numpy(cells: Any) -> np.ndarray:
    """An Arrow array of numbers without nulls as a numpy array; decimals become float64."""
    import pyarrow as pa

    if pa.types.is_decimal(cells.type):
        cells = cells.cast(pa.float64())
    return np.asarray(cells.to_numpy(zero_copy_only=False))


def nulls(cells: Any) -> np.ndarray:
    """(n,) bool: which cells of an Arrow array are missing."""
    if not cells.null_count:
        return np.zeros(len(cells), dtype=bool)
    return np.asarray(cells.is_null().to_numpy(zero_copy_only=False))


def pictures_in(cells: Any) -> Any:
    """The encoded pictures in a column of bytes or of Hugging Face's structs {bytes, path}; None for other columns."""
    import pyarrow as pa

    kind = cells.type
    if pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
        cells = cells.field("bytes")
        kind = cells.type
    return cells if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) else None


def runs(mask: np.ndarray) -> list[tuple[int, int]]:
    """[begin, end) of each run of consecutive true entries in mask, (n,) bool."""
    edges = np.flatnonzero(np.diff(mask, prepend=False, append=False))
    return [(int(begin), int(end)) for begin, end in edges.reshape(-1, 2)]


def read_columns(
    paths: Sequence[Path], columns: Sequence[Column], batches: Callable[..., Any], sizes: Sequence[int], rows: int
) -> list[Any]:
    """The results of all columns, over all rows of all files. Files are read `rows` rows at a time, so that no file is
    ever in memory as a whole.

    batches: function (path, names, rows) -> iterable of Arrow record batches. sizes: the number of rows of each file, 0
    where it is not known. Raises ValueError if cells are missing or unusable.
    """
    for column in columns:
        column.total = sum(sizes)
    total = 0
    for path in paths:
        first = 0
        for batch in batches(path, list(dict.fromkeys(name for column in columns for name in column.names)), rows):
            for column in columns:
                column.take(batch, first, path)
            first += len(batch)
        for column in columns:
            column.check(path)
        total += first
    if not total:
        raise ValueError(f"{paths[0]} must have rows, got none; fetch it again")
    return [column.whole() for column in columns]

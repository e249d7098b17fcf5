"""Your own Parquet files: columns of inputs and labels, and optionally of clients and of marks for test rows.

The input is one column or several. One column holds numbers, lists of numbers (of equal length, flat, nested or of
fixed size) or encoded pictures (PNG, JPEG, WebP), as bytes or as Hugging Face's structs {bytes, path}. Unsigned 8-bit
numbers and pictures are scaled to [0, 1], grey pictures with 16 bits from their own range; other numbers become float32
without scaling. A picture that cannot be read without loss is refused, such as one with transparent pixels; with shape
(1, height, width), colours become their brightness. Several columns hold one number each, which becomes float32 without
scaling.

Test rows are in separate files, test*.parquet beside train*.parquet. Or they are among the rows of all files, where the
column `split_column` marks them or the fraction `test_fraction` of all rows is drawn. The column `held_out` marks rows
that their client does not train on, and so gives each client its own test set.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from .. import counted
from ..files.cells import Clients, Column, Feature, Inputs, Labels, Marks
from ..files.roots import Found, Layout
from ..models.small import Mlp
from ..partitions.standard import Iid
from ..workload import HELD_OUT, VALIDATION, Columns, Model, Partition
from .images import FromFiles, columns_of, pictures

TRAIN = ("train", "training")
TEST = ("test", "testing")
VALID = ("validation", "valid")


@dataclass(frozen=True)
class Parquet(FromFiles):
    """Rows of Parquet files.

    `folder`: the folder below the data root. `input`, `label`, `client`: names of the columns; `input` may be several.
    `shape`: shape of one input. `classes`: number of classes; labels are 0, 1, … `split_column`: a column with "train"
    or "test", or true in test rows. `test_fraction`: the fraction of all rows that are test rows. `held_out`: a column
    that is true in rows that their client does not train on. `validation`: the same for rows by which settings are
    chosen.
    """

    model: Model = Mlp()
    partition: Partition = Iid()
    folder: str = "table"  # pyright: ignore[reportIncompatibleVariableOverride]
    shape: tuple[int, ...] = (1,)  # pyright: ignore[reportIncompatibleVariableOverride]
    classes: int = 2  # pyright: ignore[reportIncompatibleVariableOverride]
    input: str | tuple[str, ...] = "input"
    label: str = "label"
    client: str | None = None
    split_column: str | None = None
    test_fraction: float = 0.0
    held_out: str | None = None
    validation: str | None = None

    fetch: ClassVar[str] = "put your files there, or set workload.folder"

    def __post_init__(self) -> None:
        if isinstance(self.input, tuple) and len(set(self.input)) < len(self.input):
            raise ValueError(f"input must not repeat a column, got {list(self.input)}; drop what is repeated")
        if isinstance(self.input, tuple) and self.shape == (1,):
            object.__setattr__(self, "shape", (len(self.input),))
        if self.classes < 2 or min(self.shape, default=0) < 1:
            raise ValueError(
                f"classes >= 2 and sides of 1 or more must hold, got classes={self.classes}, shape={self.shape}"
            )
        if isinstance(self.input, tuple) and self.shape != (len(self.input),):
            raise ValueError(
                f"shape must be ({len(self.input)},), one for each column of input, got {self.shape}; leave it out"
            )
        if not 0 <= self.test_fraction < 1:
            raise ValueError(f"0 <= test_fraction < 1 must hold, got test_fraction={self.test_fraction}")
        if self.split_column is not None and self.test_fraction:
            raise ValueError(
                f"only one of split_column and test_fraction may be set, got split_column={self.split_column!r}, "
                f"test_fraction={self.test_fraction}; leave one out"
            )

    @property
    def in_one(self) -> bool:
        """Whether training and test rows are in the same files."""
        return self.split_column is not None or self.test_fraction > 0

    def settings(self) -> str:
        rows = f"{self.split_column} {self.test_fraction} {self.held_out}"
        rows += f" {self.validation}" if self.validation is not None else ""
        return f"Parquet {self.input} {self.label} {self.client} {self.shape} {rows} checked"

    def layouts(self) -> tuple[Layout, ...]:
        train, test = ("*.parquet", "*.parquet") if self.in_one else ("train*.parquet", "test*.parquet")
        return tuple(Layout((f"{top}{train}",), (f"{top}{test}",), self.read) for top in ("", "data/"))

    def decode(self, found: Found) -> tuple[Columns, Columns]:
        if not self.in_one:
            train, test = found.read()
        else:
            columns = dict(self.read(found.train, True))
            tests = columns.pop("test") if "test" in columns else self.drawn(len(columns["label"]))
            train, test = ({name: rows[mask] for name, rows in columns.items()} for mask in (~tests, tests))
        if train["input"].dtype != test["input"].dtype:
            raise ValueError(
                f"{self.input} must be of one type in the training and test files, got {train['input'].dtype} and "
                f"{test['input'].dtype}: bytes are scaled to [0, 1], other numbers are not"
            )
        return train, {name: rows for name, rows in test.items() if name not in (HELD_OUT, VALIDATION)}

    def drawn(self, rows: int) -> np.ndarray:
        """(rows,) bool: true in test rows, which are drawn at random but are the same for every seed."""
        tests = np.zeros(rows, dtype=bool)
        count = round(self.test_fraction * rows)
        tests[counted.numpy_generator("parquet", "test rows").permutation(rows)[:count]] = True
        return tests

    def read(self, paths: list[Path], train: bool) -> Columns:
        """The columns "input" and "label", and "client", "test" and "held_out" where the settings name them."""
        features = self.input if isinstance(self.input, tuple) else ()
        wanted: dict[str, Column] = {f"feature {name}": Feature(name, (1,), pictures) for name in features}
        if isinstance(self.input, str):
            wanted["input"] = Inputs(self.input, self.shape, pictures)
        wanted["label"] = Labels(self.label)
        if self.client is not None:
            wanted["client"] = Clients(self.client)
        if self.split_column is not None:
            wanted["test"] = Marks(self.split_column, TEST, TRAIN)
        if self.held_out is not None and train:
            wanted[HELD_OUT] = Marks(self.held_out, TEST, TRAIN)
        if self.validation is not None and train:
            wanted[VALIDATION] = Marks(self.validation, VALID, TRAIN)
        columns = dict(zip(wanted, columns_of(paths, list(wanted.values())), strict=True))
        if features:
            columns["input"] = np.concatenate([columns.pop(f"feature {name}") for name in features], axis=1)
        return columns

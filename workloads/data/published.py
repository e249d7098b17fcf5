"""Published data sets: rows from files under a data root, or synthetic rows in the shapes of the set.

A synthetic image is the pattern of its class under noise, and the words of a synthetic text are drawn from the
distribution of its class. A model can learn from them, but they have nothing else in common with the data set. They are
for tests without the files, never for results.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from .. import counted
from ..classification import Classification
from ..files.roots import IN_PART
from ..workload import Columns, note

EACH = 8
"""Rows of a synthetic natural client (writer, role or user)."""


def test_rows(rows: int, fraction: float) -> np.ndarray:
    """(rows,) bool: true in this fraction of the rows, drawn at random, the same for every seed. They are test rows."""
    tests = np.zeros(rows, dtype=bool)
    tests[counted.numpy_generator("parquet", "test rows").permutation(rows)[: round(fraction * rows)]] = True
    return tests


def check_fraction(fraction: float) -> None:
    """Raise ValueError for a fraction that leaves no training rows."""
    if not 0 <= fraction < 1:
        raise ValueError(f"0 <= test_fraction < 1 must hold, got test_fraction={fraction}")


@dataclass(frozen=True)
class Published(Classification):
    """A data set in files. `data_root`: a folder that contains the folder of the set, or that folder itself; by default
    $FEDFLEET_DATA. `stand_in`: if not 0, the number of synthetic training rows that replace the files; there are a
    quarter as many synthetic test rows."""

    data_root: str | None = None
    stand_in: int = 0

    full_rows: ClassVar[tuple[int, int] | None] = None
    """The (training, test) rows of the published set; None if it has no fixed number."""

    def check(self) -> None:
        super().check()
        if self.stand_in < 0:
            raise ValueError(f"stand_in >= 0 must hold, got stand_in={self.stand_in}")
        if not self.stand_in:
            self.check_files()

    def load(self) -> tuple[Columns, Columns]:
        if self.stand_in:
            return self.made_up(self.stand_in, "train"), self.made_up(-(-self.stand_in // 4), "test")
        train, test = self.from_files()
        if said := self.in_part(len(train["label"]), len(test["label"])):
            note(f"{IN_PART}{said}")
        return train, test

    def in_part(self, train: int, test: int) -> str:
        """A sentence on files with so many training and test rows if they are a part of the set, else ""."""
        counts = [*zip((train, test), self.full_rows or (0, 0), ("training", "test"), strict=True)]
        if all(rows >= full for rows, full, _ in counts):
            return ""
        told = " and ".join(f"{rows:,} of {full:,} {part} rows" for rows, full, part in counts)
        return f"{type(self).__name__} has {told}"

    @property
    def training_rows(self) -> int | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.stand_in or (None if self.full_rows is None else self.full_rows[0])

    @abstractmethod
    def check_files(self) -> None:
        """Raise ValueError if the files are missing or damaged. It must return quickly."""

    @abstractmethod
    def from_files(self) -> tuple[Columns, Columns]:
        """The columns of (train, test) from the files; see `Classification.load`."""

    def made_up(self, rows: int, part: str) -> Columns:
        """The columns of `rows` synthetic rows. part: "train" or "test"."""
        random = counted.numpy_generator(0, "stand in", part)
        label = random.permutation(np.arange(rows) % self.classes)
        columns = {"input": self.made_up_inputs(label, random), "label": label}
        return {**columns, "client": np.arange(rows) // EACH} if part == "train" else columns

    def made_up_inputs(self, label: np.ndarray, random: np.random.Generator) -> np.ndarray:
        """(n, *shape) uint8: synthetic inputs for the labels, (n,)."""
        patterns = counted.numpy_generator(0, "stand in", "patterns").uniform(64, 192, (self.classes, *self.shape))
        noisy = patterns[label] + random.normal(0, 48, (len(label), *self.shape))
        return np.clip(np.rint(noisy), 0, 255).astype(np.uint8)

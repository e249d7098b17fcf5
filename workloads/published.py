"""Published sets: rows from files under a data root, or made up in the set's shapes where the files are not to be had.

Made-up images are one pattern a class under noise, made-up texts words drawn from a law of their class: a model learns
from them, and nothing else is like the set. They are for tests of what goes with a set, never for results.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import numpy as np

from . import counted
from .base import Classification, Columns

EACH = 8
"""Rows of a made-up writer, role or user."""


@dataclass(frozen=True)
class Published(Classification):
    """`data_root`: a folder with the set's folder in it, or that folder; $FEDFLEET_DATA where it is not given.
    `stand_in`: so many made-up training rows, and a quarter as many to test, in place of the files."""

    data_root: str | None = None
    stand_in: int = 0

    def check(self) -> None:
        super().check()
        if self.stand_in < 0:
            raise ValueError(f"stand_in >= 0 must hold, got stand_in={self.stand_in}")
        if not self.stand_in:
            self.check_files()

    def load(self) -> tuple[Columns, Columns]:
        if not self.stand_in:
            return self.from_files()
        return self.made_up(self.stand_in, "train"), self.made_up(-(-self.stand_in // 4), "test")

    @abstractmethod
    def check_files(self) -> None:
        """Raise ValueError, quickly, where they cannot be had."""

    @abstractmethod
    def from_files(self) -> tuple[Columns, Columns]:
        """(train, test); see `load`."""

    def made_up(self, rows: int, part: str) -> Columns:
        random = counted.numpy_generator(0, "stand in", part)
        label = random.permutation(np.arange(rows) % self.classes)
        columns = {"input": self.made_up_inputs(label, random), "label": label}
        return {**columns, "client": np.arange(rows) // EACH} if part == "train" else columns

    def made_up_inputs(self, label: np.ndarray, random: np.random.Generator) -> np.ndarray:
        """(n, *shape) bytes."""
        patterns = counted.numpy_generator(0, "stand in", "patterns").uniform(64, 192, (self.classes, *self.shape))
        noisy = patterns[label] + random.normal(0, 48, (len(label), *self.shape))
        return np.clip(np.rint(noisy), 0, 255).astype(np.uint8)

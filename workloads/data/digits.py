"""scikit-learn's digits: 1,797 scanned digits of 8 x 8 pixels. The package contains them, so nothing is downloaded.

Of every five images of a class the last one is a test image: 355 of 1,797, for every seed. (Every fifth image of the
whole set would be a bad choice: over long stretches the file runs 0, 1, ..., 9, so that the test set would have 42
zeros and 26 twos.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

import numpy as np

from ..classification import Classification
from ..models.small import Mlp
from ..partitions.standard import Iid
from ..workload import Columns, Model, Partition


def every_fifth(labels: np.ndarray) -> np.ndarray:
    """(n,) bool: true at the fifth, tenth, ... row of each class."""
    chosen = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        chosen[np.flatnonzero(labels == label)[4::5]] = True
    return chosen


def file_of_digits() -> Path:
    """The file in scikit-learn's package. It is read without the package, whose import takes longer than a short run.
    Raises ValueError if it is not there."""
    package = find_spec("sklearn")
    for folder in (package.submodule_search_locations or ()) if package is not None else ():
        if (file := Path(folder, "datasets", "data", "digits.csv.gz")).is_file():
            return file
    raise ValueError(
        "scikit-learn must be installed for the digits, got no sklearn/datasets/data/digits.csv.gz; run: pip install "
        "scikit-learn"
    )


@dataclass(frozen=True)
class Digits(Classification):
    """Inputs (1, 8, 8) float32 in [0, 1], 10 classes; 1,442 training and 355 test rows."""

    model: Model = Mlp((64,))
    partition: Partition = Iid()

    classes: ClassVar[int] = 10
    shape: ClassVar[tuple[int, ...]] = (1, 8, 8)
    training_rows: ClassVar[int] = 1442  # pyright: ignore[reportIncompatibleVariableOverride]

    def check(self) -> None:
        super().check()
        file_of_digits()

    def data_files(self) -> Mapping[str, Path]:
        return {**super().data_files(), "scikit-learn/digits.csv.gz": file_of_digits()}

    def load(self) -> tuple[Columns, Columns]:
        numbers = np.loadtxt(file_of_digits(), delimiter=",")  # in each row the pixels, 0 to 16, and the class
        images = (numbers[:, :-1] / 16).astype(np.float32).reshape(-1, *self.shape)
        labels = numbers[:, -1].astype(np.int64)
        test = every_fifth(labels)
        return {"input": images[~test], "label": labels[~test]}, {"input": images[test], "label": labels[test]}

"""Your own files in the idx format, packed (.gz) or not. MNIST, EMNIST, KMNIST and others were published in it.

An idx file holds one array: two bytes of zero, one byte for the type of its numbers, one byte for the number of its
dimensions, each dimension as a 32-bit integer, then the numbers; all of them with the most significant byte first.
http://yann.lecun.com/exdb/mnist
"""

from __future__ import annotations

import gzip
import zlib
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import ClassVar

import numpy as np

from ..files.cells import check_finite, labels_of
from ..files.roots import Found, Layout, damaged
from ..models.small import Mlp
from ..partitions.standard import Iid
from ..workload import Columns, Model, Partition
from .images import FromFiles
from .published import check_fraction, test_rows

TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
"""The third byte of a file -> the type of its numbers."""


def array_of(path: Path) -> np.ndarray:
    """The array in one idx file, packed or not, in the byte order of this machine. Raises ValueError if it is
    damaged."""
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        if len(data) < 4 or data[:2] != b"\0\0" or data[2] not in TYPES:
            raise ValueError("it does not begin like an idx file")
        begin = 4 + 4 * data[3]
        shape = tuple(int(side) for side in np.frombuffer(data[4:begin], ">i4"))
        kind = np.dtype(TYPES[data[2]])
        if len(shape) != data[3] or min(shape, default=-1) < 0 or len(data) != begin + kind.itemsize * prod(shape):
            raise ValueError(f"{len(data)} bytes do not hold {' x '.join(map(str, shape)) or 'its'} numbers")
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise damaged(path, error) from error
    return np.frombuffer(data, kind, offset=begin).reshape(shape).astype(kind.newbyteorder("="), copy=False)


@dataclass(frozen=True)
class IdxFiles(FromFiles):
    """Images and labels in idx files. `folder`: the folder below the data root; names of training files contain
    "train", those of test files "t10k" or "test". `shape`: shape of one input. `classes`: number of classes; labels are
    0, 1, … `test_fraction`: the fraction of the training rows that are test rows, in the place of test files."""

    model: Model = Mlp()
    partition: Partition = Iid()
    folder: str = "idx"  # pyright: ignore[reportIncompatibleVariableOverride]
    shape: tuple[int, ...] = (1, 28, 28)  # pyright: ignore[reportIncompatibleVariableOverride]
    classes: int = 10  # pyright: ignore[reportIncompatibleVariableOverride]
    test_fraction: float = 0.0

    fetch: ClassVar[str] = "put your files there, or set workload.folder"

    def __post_init__(self) -> None:
        if self.classes < 2 or min(self.shape, default=0) < 1:
            raise ValueError(
                f"classes >= 2 and sides of 1 or more must hold, got classes={self.classes}, shape={self.shape}"
            )
        check_fraction(self.test_fraction)

    def settings(self) -> str:
        return f"idx {self.shape} {self.classes}" + (f" {self.test_fraction}" if self.test_fraction else "")

    def layouts(self) -> tuple[Layout, ...]:
        return tuple(
            Layout(
                (f"{top}*train*images*idx*", f"{top}*train*labels*idx*"),
                (f"{top}*{test}*images*idx*", f"{top}*{test}*labels*idx*"),
                self.read,
            )
            for test in (("train",) if self.test_fraction else ("t10k", "test"))
            for top in ("", "raw/", "*/raw/")
        )

    def decode(self, found: Found) -> tuple[Columns, Columns]:
        if self.test_fraction:
            rows = self.read(found.train, True)
            tests = test_rows(len(rows["label"]), self.test_fraction)
            return {name: c[~tests] for name, c in rows.items()}, {name: c[tests] for name, c in rows.items()}
        train, test = found.read()
        if train["input"].dtype != test["input"].dtype:
            raise ValueError(
                f"{self.folder} must have inputs of one type, got {train['input'].dtype} for training and "
                f"{test['input'].dtype} for testing: bytes are scaled to [0, 1], other numbers are not"
            )
        return train, test

    def read(self, paths: list[Path], train: bool) -> Columns:
        """The columns "input" and "label". paths: one file of images and one of labels; each may be there packed,
        unpacked or both."""
        unpacked = {
            path.name.removesuffix(".gz"): path for path in sorted(paths, key=lambda path: path.suffix != ".gz")
        }
        if len(unpacked) != 2:
            raise ValueError(
                f"{paths[0].parent} must have one file of images and one of labels, got {', '.join(sorted(unpacked))}; "
                "set workload.folder"
            )
        images, labels = (unpacked[name] for name in sorted(unpacked, key=lambda name: "labels" in name))
        inputs, label = array_of(images), array_of(labels)
        sides = [side for side in inputs.shape[1:] if side != 1]
        if len(inputs) != len(label) or (
            sides != [side for side in self.shape if side != 1] and inputs.shape[1:] != (prod(self.shape),)
        ):
            raise ValueError(
                f"{images} must have an input of shape {self.shape} for each of the {len(label)} labels, got an array "
                f"of {' x '.join(map(str, inputs.shape))}; set workload.shape"
            )
        if inputs.dtype != np.uint8:
            check_finite(inputs, str(images), "input")
            inputs = inputs.astype(np.float32)
        return {"input": inputs.reshape(-1, *self.shape), "label": labels_of(label, self.classes, str(labels))}

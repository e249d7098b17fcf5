"""MNIST: 28 x 28 grey images of handwritten digits, 60,000 for training and 10,000 for testing. LeCun et al. 1998.

The writers are in the labels of QMNIST (Yadav and Bottou 2019, arXiv:1905.10498). If QMNIST/raw lies beside MNIST/raw
and has qmnist-train-labels-idx2-int (packed or not), the partition `natural` has 539 clients, one for each writer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from ..models.small import LeNet
from ..partitions.standard import Iid
from ..workload import Columns, Model, Partition
from .idx import File, Idx, IdxSet, numbers

PUBLISHED = IdxSet(
    "MNIST",
    "mnist",
    {
        "train-images-idx3-ubyte": File("f68b3c2dcbeaaa9fbdd348bbdeb94873", 16 + 60_000 * 784),
        "train-labels-idx1-ubyte": File("d53e105ee54ea40749a09fcbcd1e9432", 8 + 60_000),
        "t10k-images-idx3-ubyte": File("9fb629c4189551a2d022fa330f9573f3", 16 + 10_000 * 784),
        "t10k-labels-idx1-ubyte": File("ec29112dd5afa0611ce80d1b7f02629c", 8 + 10_000),
    },
)
WRITERS = Path("QMNIST", "raw", "qmnist-train-labels-idx2-int")


def existing(path: Path) -> list[Path]:
    """The file, packed only where it is not there unpacked; [] if there is none."""
    return [one for one in (path, path.with_name(f"{path.name}.gz")) if one.is_file()][:1]


def writers(place: Path, labels: np.ndarray) -> np.ndarray | None:
    """(60,000,) int64: the writer of each training image; None without the labels of QMNIST. labels: those of MNIST."""
    path = place / WRITERS
    if not existing(path):
        return None
    about = numbers(path, 8)
    if len(about) != len(labels) or (about[:, 0] != labels).any():
        raise ValueError(f"{path} must have the labels of MNIST in its first column, got other ones; fetch it again")
    return about[:, 2].astype(np.int64)


@dataclass(frozen=True)
class Mnist(Idx):
    """Inputs (1, 28, 28) bytes, 10 classes. With the labels of QMNIST, the column "client" has the writers' numbers."""

    model: Model = LeNet()
    partition: Partition = Iid()

    published: ClassVar[IdxSet] = PUBLISHED
    mean: ClassVar[tuple[float, ...]] = (0.1307,)
    std: ClassVar[tuple[float, ...]] = (0.3081,)

    def data_files(self) -> Mapping[str, Path]:
        of_writers = [] if self.stand_in else existing(self.published.place(self.data_root) / WRITERS)
        return {**super().data_files(), **{f"{self.published.folder}/{path.name}": path for path in of_writers}}

    def from_files(self) -> tuple[Columns, Columns]:
        train, test = super().from_files()
        clients = writers(self.published.place(self.data_root), train["label"])
        return (train if clients is None else {**train, "client": clients}), test

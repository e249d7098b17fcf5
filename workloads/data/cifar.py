"""CIFAR-10 and CIFAR-100: 32 x 32 colour images. Krizhevsky 2009.

They are read from Parquet files of pictures (columns `image` and `label`), from the published Python batches, or from
the published archive of these. The batches are pickles; `unpickle` reads them without running code.
"""

from __future__ import annotations

import tarfile
import zlib
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np

from ..files.roots import Layout, damaged
from ..files.unpickle import arrays
from ..models.small import LeNet
from ..partitions.standard import Iid
from ..workload import Columns, Model, Partition
from .augment import Augmented
from .images import read_pictures

SHAPE = (3, 32, 32)


def batch(data: bytes, where: Path) -> Columns:
    """The columns of one published batch; for CIFAR-100 with the fine labels. where: its file, for messages."""
    found = arrays(data, where)
    labels = found.get("fine_labels", found.get("labels"))
    pixels = found.get("data")
    if not isinstance(pixels, np.ndarray) or not isinstance(labels, list) or pixels.shape != (len(labels), 3072):
        raise damaged(where, "it does not hold 3072 bytes and a label for each row")
    if pixels.dtype != np.uint8 or not all(type(label) is int and 0 <= label < 100 for label in labels):
        raise damaged(where, "its pixels are not bytes, or its labels are not whole numbers below 100")
    return {"input": pixels.astype(np.uint8).reshape(-1, *SHAPE), "label": np.array(labels, dtype=np.int64)}


def joined(parts: list[Columns]) -> Columns:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def read_batches(paths: list[Path], train: bool) -> Columns:
    return joined([batch(path.read_bytes(), path) for path in paths])


def read_archive(paths: list[Path], train: bool, names: tuple[tuple[str, ...], tuple[str, ...]]) -> Columns:
    """Read the batches in an archive. names: the members of the archive for (train, test)."""
    (path,) = paths
    try:
        with tarfile.open(path) as archive:
            members = [archive.extractfile(name) for name in names[0 if train else 1]]
            data = [member.read() for member in members if member is not None]
    except (tarfile.TarError, KeyError, OSError, EOFError, zlib.error) as error:
        raise damaged(path, error) from error
    return joined([batch(one, path) for one in data])


def layouts(folder: str, train: tuple[str, ...], test: tuple[str, ...]) -> tuple[Layout, ...]:
    """The forms in which CIFAR is published. folder: the folder of the batches, after which the archive is named.
    train, test: names of the batches."""
    members = tuple(tuple(f"{folder}/{name}" for name in names) for names in (train, test))
    archive = (f"{folder.replace('-batches-py', '-python')}.tar.gz",)
    return (
        Layout(("train*.parquet",), ("test*.parquet",), lambda paths, train: read_pictures(paths, SHAPE)),
        Layout(members[0], members[1], read_batches),
        Layout(archive, archive, partial(read_archive, names=(members[0], members[1]))),
    )


@dataclass(frozen=True)
class Cifar10(Augmented):
    """Inputs (3, 32, 32) bytes, 10 classes. They are normalised by the statistics of ImageNet, as in Li et al. 2025;
    those of CIFAR-10 are .4914, .4822, .4465 and .2470, .2435, .2616."""

    model: Model = LeNet()
    partition: Partition = Iid()
    augment: tuple[str, ...] = ("crop", "flip")

    folder: ClassVar[str] = "cifar10"
    fetch: ClassVar[str] = "torchvision.datasets.CIFAR10(root, download=True) fetches them"
    classes: ClassVar[int] = 10
    full_rows: ClassVar[tuple[int, int] | None] = (50_000, 10_000)
    shape: ClassVar[tuple[int, ...]] = SHAPE
    mean: ClassVar[tuple[float, ...]] = (0.485, 0.456, 0.406)
    std: ClassVar[tuple[float, ...]] = (0.229, 0.224, 0.225)

    def layouts(self) -> tuple[Layout, ...]:
        return layouts("cifar-10-batches-py", tuple(f"data_batch_{i}" for i in range(1, 6)), ("test_batch",))


@dataclass(frozen=True)
class Cifar100(Augmented):
    """Inputs (3, 32, 32) bytes, 100 fine classes."""

    model: Model = LeNet()
    partition: Partition = Iid()
    augment: tuple[str, ...] = ("crop", "flip")

    folder: ClassVar[str] = "cifar100"
    fetch: ClassVar[str] = "torchvision.datasets.CIFAR100(root, download=True) fetches them"
    classes: ClassVar[int] = 100
    full_rows: ClassVar[tuple[int, int] | None] = (50_000, 10_000)
    shape: ClassVar[tuple[int, ...]] = SHAPE
    mean: ClassVar[tuple[float, ...]] = (0.5071, 0.4865, 0.4409)
    std: ClassVar[tuple[float, ...]] = (0.2673, 0.2564, 0.2762)

    def layouts(self) -> tuple[Layout, ...]:
        return layouts("cifar-100-python", ("train",), ("test",))

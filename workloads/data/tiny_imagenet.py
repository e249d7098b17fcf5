"""Tiny ImageNet: 64 x 64 colour images, 200 classes, 100,000 for training; its 10,000 validation images are the test
set.

It is read from Parquet files of pictures (columns `image` and `label`), or from the published folder tiny-imagenet-200,
whose classes are numbered in the order of their ids. The model has 200 outputs even if the files have fewer classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from ..files.roots import Layout, damaged
from ..models.small import LeNet
from ..partitions.standard import Iid
from ..workload import Columns, Model, Partition
from .augment import Augmented
from .images import pictures, read_pictures

SHAPE = (3, 64, 64)


def read_folder(paths: list[Path], train: bool) -> Columns:
    """The columns of the published folder. paths: for training train/<class>/images/*.JPEG; for testing the file of
    annotations, then val/images/*.JPEG."""
    if train:
        classes = [path.parent.parent.name for path in paths]
        ids = sorted(set(classes))
    else:
        annotations, *paths = paths
        ids = sorted(path.name for path in (annotations.parents[1] / "train").iterdir() if path.is_dir())
        rows = [line.split("\t") for line in annotations.read_text(encoding="utf-8").splitlines()]
        named = {row[0]: row[1] for row in rows if len(row) > 1}
        lacking = [path.name for path in paths if named.get(path.name) not in ids]
        if lacking:
            raise damaged(annotations, f"it has no known class for {lacking[0]}")
        classes = [named[path.name] for path in paths]
    number = {name: i for i, name in enumerate(ids)}
    label = np.array([number[name] for name in classes], dtype=np.int64)
    return {"input": pictures([path.read_bytes() for path in paths], SHAPE, paths[0].parent), "label": label}


@dataclass(frozen=True)
class TinyImagenet(Augmented):
    """Inputs (3, 64, 64) bytes, 200 classes. They are normalised by the statistics of ImageNet."""

    model: Model = LeNet()
    partition: Partition = Iid()
    augment: tuple[str, ...] = ("crop", "flip")

    folder: ClassVar[str] = "tiny_imagenet"
    fetch: ClassVar[str] = "unpack http://cs231n.stanford.edu/tiny-imagenet-200.zip there"
    classes: ClassVar[int] = 200
    full_rows: ClassVar[tuple[int, int] | None] = (100_000, 10_000)
    shape: ClassVar[tuple[int, ...]] = SHAPE
    mean: ClassVar[tuple[float, ...]] = (0.485, 0.456, 0.406)
    std: ClassVar[tuple[float, ...]] = (0.229, 0.224, 0.225)

    def layouts(self) -> tuple[Layout, ...]:
        top = "tiny-imagenet-200"
        validation = (f"{top}/val/val_annotations.txt", f"{top}/val/images/*.JPEG")
        return (
            Layout(("train*.parquet",), ("val*.parquet",), lambda paths, train: read_pictures(paths, SHAPE)),
            Layout((f"{top}/train/*/images/*.JPEG",), validation, read_folder),
        )

"""SVHN: 32 x 32 colour images of house numbers, 73,257 for training and 26,032 for testing. Netzer et al. 2011.

torchvision's class reads the files. It checks their digests and needs scipy for their format.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

import numpy as np

from ..files.roots import Layout, damaged
from ..files.vision import torchvision_datasets
from ..models.convolutional import Cnn4
from ..partitions.standard import Iid
from ..workload import Columns, Model, Partition
from .augment import Augmented


def read(paths: list[Path], train: bool) -> Columns:
    """The columns of the published file of one split."""
    (path,) = paths
    try:
        images = torchvision_datasets().SVHN(path.parent, split="train" if train else "test")
    except (RuntimeError, ValueError, TypeError, OSError) as error:
        raise damaged(path, error) from error
    return {"input": np.ascontiguousarray(images.data), "label": np.asarray(images.labels).astype(np.int64)}


@dataclass(frozen=True)
class Svhn(Augmented):
    """Inputs (3, 32, 32) bytes, 10 classes. All of them are normalised by .4496 and .1995 in every channel. Some
    published code normalises test images by the statistics of the test set, .4560 and .2244."""

    model: Model = Cnn4()
    partition: Partition = Iid()

    folder: ClassVar[str] = "svhn"
    fetch: ClassVar[str] = "torchvision.datasets.SVHN(root, split, download=True) fetches them"
    classes: ClassVar[int] = 10
    full_rows: ClassVar[tuple[int, int] | None] = (73_257, 26_032)
    shape: ClassVar[tuple[int, ...]] = (3, 32, 32)
    mean: ClassVar[tuple[float, ...]] = (0.4496, 0.4496, 0.4496)
    std: ClassVar[tuple[float, ...]] = (0.1995, 0.1995, 0.1995)

    def check_files(self) -> None:
        super().check_files()
        if find_spec("scipy") is None:
            raise ValueError("scipy must be installed to read SVHN, got no such module; run: pip install scipy")

    def layouts(self) -> tuple[Layout, ...]:
        return (Layout(("train_32x32.mat",), ("test_32x32.mat",), read),)

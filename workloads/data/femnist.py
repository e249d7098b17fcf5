"""FEMNIST: 28 x 28 grey images of handwritten digits and letters, 62 classes, one client per writer. From LEAF."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from ..files.leaf import read
from ..files.roots import Layout, damaged
from ..models.convolutional import FemnistCnn
from ..partitions.natural import Natural, client_numbers
from ..workload import Columns, Model, Partition
from .images import FromFiles


def images(paths: list[Path], train: bool) -> Columns:
    """The columns "input", "label" and "client" of LEAF's files."""
    found = read(paths)
    try:
        pixels = np.asarray(found.x, dtype=np.float32).reshape(-1, 1, 28, 28)
        label = np.asarray(found.y, dtype=np.int64)
    except (ValueError, TypeError) as error:
        raise damaged(paths[0], error) from error
    # LEAF divides bytes by 255; rounding restores them.
    pixels = np.rint(pixels * 255).astype(np.uint8)
    return {"input": pixels, "label": label, "client": client_numbers(found.users)}


@dataclass(frozen=True)
class Femnist(FromFiles):
    """Inputs (1, 28, 28) bytes, white is 255. The natural clients are the writers."""

    model: Model = FemnistCnn()
    partition: Partition = Natural()

    folder: ClassVar[str] = "femnist"
    fetch: ClassVar[str] = "LEAF's data/femnist/preprocess.sh makes them"
    classes: ClassVar[int] = 62
    shape: ClassVar[tuple[int, ...]] = (1, 28, 28)

    def layouts(self) -> tuple[Layout, ...]:
        return tuple(Layout((f"{top}train/*.json",), (f"{top}test/*.json",), images) for top in ("", "leaf/", "data/"))

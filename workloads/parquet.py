"""Parquet files of your own: a column of numbers or of pictures, one of labels, perhaps one of clients.

Numbers are lists of equal length, reshaped to `shape`; whole numbers of 8 bits stay bytes and are scaled to [0, 1], all
else becomes float32. Pictures are encoded (PNG, JPEG, WebP), of the size that `shape` says.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import ClassVar

import numpy as np

from .base import Columns, Model, Partition
from .images import FromFiles, pictures, table
from .models import Mlp
from .partitions import Iid
from .roots import Layout


@dataclass(frozen=True)
class Parquet(FromFiles):
    """`folder` below the data root, with train*.parquet and test*.parquet; `input`, `label`, `client`: their columns;
    `shape` of an input, `classes` of labels 0, 1, …"""

    model: Model = Mlp()
    partition: Partition = Iid()
    folder: str = "table"  # pyright: ignore[reportIncompatibleVariableOverride]
    shape: tuple[int, ...] = (1,)  # pyright: ignore[reportIncompatibleVariableOverride]
    classes: int = 2  # pyright: ignore[reportIncompatibleVariableOverride]
    input: str = "input"
    label: str = "label"
    client: str | None = None

    fetch: ClassVar[str] = "put your files there, or give workload.folder"

    def __post_init__(self) -> None:
        if self.classes < 2 or min(self.shape, default=0) < 1:
            raise ValueError(
                f"classes >= 2 and sides of 1 or more must hold, got classes={self.classes}, shape={self.shape}"
            )

    def settings(self) -> str:
        return f"Parquet {self.input} {self.label} {self.client} {self.shape}"

    def layouts(self) -> tuple[Layout, ...]:
        return (Layout(("train*.parquet",), ("test*.parquet",), self.read),)

    def read(self, paths: list[Path], train: bool) -> Columns:
        names = [name for name in (self.input, self.label, self.client) if name is not None]
        found = table(paths, names)
        if not isinstance(found[self.label], np.ndarray):
            raise ValueError(f"{paths[0]} must have whole numbers in {self.label}, got something else")
        columns = {
            "input": self.inputs_of(found[self.input], paths[0]),
            "label": np.asarray(found[self.label]).astype(np.int64),
        }
        if self.client is None:
            return columns
        clients = np.asarray([str(one) for one in found[self.client]])
        return {**columns, "client": np.unique(clients, return_inverse=True)[1].astype(np.int64)}

    def inputs_of(self, cells: list | np.ndarray, where: Path) -> np.ndarray:
        """(n, *shape)"""
        if len(cells) and isinstance(cells[0], bytes):
            if len(self.shape) != 3 or self.shape[0] not in (1, 3):
                raise ValueError(f"pictures need shape (1 or 3, height, width), got shape={self.shape}")
            return pictures(list(cells), self.shape, where)
        try:
            values = np.asarray(cells)
            values = values if values.dtype == np.uint8 else values.astype(np.float32)
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"{where} must have numbers or lists of equal length in {self.input}, got {error}"
            ) from error
        if values.size != len(cells) * prod(self.shape):
            raise ValueError(
                f"{where} must have {prod(self.shape)} numbers a row in {self.input}, got shape {values.shape[1:]}"
            )
        return values.reshape(-1, *self.shape)

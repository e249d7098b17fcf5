"""What image sets share: files under a data root, decoded once into the cache, varied while training."""

from __future__ import annotations

import io
import os
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from .base import Columns, Model, Partition
from .cache import cached
from .cells import Column, Inputs, Labels, read_columns
from .published import Published
from .roots import Found, Layout, damaged, locate

CHUNK = 2000
"""Encoded pictures in memory at once."""


@dataclass(frozen=True)
class FromFiles(Published):
    """A set fills `folder`, its folder's name; `fetch`, how to come by the files; `layouts`, the forms they are in."""

    model: Model
    partition: Partition

    folder: ClassVar[str]
    fetch: ClassVar[str]

    @abstractmethod
    def layouts(self) -> tuple[Layout, ...]: ...

    def found(self) -> Found:
        return locate(self.data_root, self.folder, self.layouts(), self.fetch)

    def check_files(self) -> None:
        for path in self.found().files:
            if path.suffix == ".parquet":
                parquet(path)

    def settings(self) -> str:
        """What else, beside the files, decides how they are decoded."""
        return type(self).__name__

    def decode(self, found: Found) -> tuple[Columns, Columns]:
        """(train, test) from the files; the slow way."""
        return found.read()

    def from_files(self) -> tuple[Columns, Columns]:
        found = self.found()
        train, test = cached(self.folder, self.settings(), found.files, lambda: self.decode(found))
        for part, columns in (("train", train), ("test", test)):
            self.suits(part, columns)
        return train, test

    def suits(self, part: str, columns: Columns) -> None:
        labels = columns["label"]
        if not len(labels):
            raise ValueError(f"{self.folder} must have rows, got none in its {part} files; fetch them again")
        if labels.min() < 0 or labels.max() >= self.classes:
            raise ValueError(
                f"0 <= label < {self.classes} must hold, got labels {labels.min()} to {labels.max()} "
                f"in the {part} files of {self.folder}"
            )


def parquet(path: Path) -> Any:
    """The open file, whose footer has been read: a truncated one is found at once."""
    import pyarrow as pa
    from pyarrow import parquet

    try:
        return parquet.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        raise damaged(path, error) from error


def batches(path: Path, columns: Sequence[str], rows: int) -> Iterator[Any]:
    """Some columns of a Parquet file as Arrow record batches of so many rows."""
    import pyarrow as pa

    file = parquet(path)
    if set(columns) - set(file.schema_arrow.names):
        raise ValueError(f"{path} must have the columns {list(columns)}, got {file.schema_arrow.names}")
    try:
        yield from file.iter_batches(rows, columns=list(columns))
    except (pa.ArrowException, OSError) as error:
        raise damaged(path, error) from error


def columns_of(paths: Sequence[Path], columns: Sequence[Column], rows: int = 1 << 14) -> list[Any]:
    """What each column makes of all rows of Parquet files, one file after the other."""
    return read_columns(paths, columns, batches, [parquet(path).metadata.num_rows for path in paths], rows)


def pictures(encoded: Sequence[bytes], shape: tuple[int, ...], where: object, first: int = 0) -> np.ndarray:
    """(n, 3, height, width) bytes from encoded pictures of that size: WebP, PNG, JPEG; `first`: the first one's row."""
    out = np.empty((len(encoded), *shape), dtype=np.uint8)

    def one(row: int) -> None:
        out[row] = picture(encoded[row], shape, f"picture {first + row} of {where}")

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
        for _ in threads.map(one, range(len(encoded)), chunksize=64):
            pass
    return out


def picture(encoded: bytes, shape: tuple[int, ...], where: str) -> np.ndarray:
    """(channels, height, width) bytes; grey where there is one channel, else RGB."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(encoded)) as image:
            pixels = np.asarray(image.convert("L" if shape[0] == 1 else "RGB"))
    except Exception as error:  # Pillow raises of many kinds on damaged bytes
        raise ValueError(f"{where} cannot be decoded ({error}); fetch its file again") from error
    pixels = pixels[None] if shape[0] == 1 else pixels.transpose(2, 0, 1)
    if pixels.shape != shape:
        raise ValueError(f"{where} must have shape {shape}, got {pixels.shape}")
    return pixels


def read_pictures(paths: list[Path], shape: tuple[int, ...]) -> Columns:
    """Parquet files with columns `image` (encoded) and `label`; decoded as they are read, so that the encoded ones are
    never in memory all at once."""
    images, labels = columns_of(paths, [Inputs("image", shape, pictures), Labels("label")], CHUNK)
    return {"input": images, "label": labels}

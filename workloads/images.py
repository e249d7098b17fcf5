"""Data sets in files under a data root, which are decoded once into the cache, and the decoding of pictures."""

from __future__ import annotations

import io
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
from .processors import processors
from .published import Published
from .roots import Found, Layout, damaged, locate

CHUNK = 2000
"""Encoded pictures that are in memory at once."""


@dataclass(frozen=True)
class FromFiles(Published):
    """A data set in files. A subclass sets `folder`, the name of its folder under the data root, and `fetch`, a text
    for messages that says how to get the files; it defines `layouts`."""

    model: Model
    partition: Partition

    folder: ClassVar[str]
    fetch: ClassVar[str]

    @abstractmethod
    def layouts(self) -> tuple[Layout, ...]:
        """The forms in which the files may be, the preferred one first."""

    def found(self) -> Found:
        """The files; ValueError if there are none."""
        return locate(self.data_root, self.folder, self.layouts(), self.fetch)

    def check_files(self) -> None:
        for path in self.found().files:
            if path.suffix == ".parquet":
                parquet(path)

    def settings(self) -> str:
        """Text that identifies how the files are decoded; the digest in the cache depends on it."""
        return type(self).__name__

    def decode(self, found: Found) -> tuple[Columns, Columns]:
        """The columns of (train, test), decoded from the files. This may be slow; the result is cached."""
        return found.read()

    def from_files(self) -> tuple[Columns, Columns]:
        found = self.found()
        train, test = cached(self.folder, self.settings(), found.files, lambda: self.decode(found))
        for part, columns in (("train", train), ("test", test)):
            self.check_labels(part, columns)
        return train, test

    def check_labels(self, part: str, columns: Columns) -> None:
        """Raise ValueError if there are no rows, or labels that are no class. part: "train" or "test"."""
        labels = columns["label"]
        if not len(labels):
            raise ValueError(f"{self.folder} must have rows, got none in its {part} files; fetch them again")
        if labels.min() < 0 or labels.max() >= self.classes:
            raise ValueError(
                f"0 <= label < {self.classes} must hold, got labels {labels.min()} to {labels.max()} "
                f"in the {part} files of {self.folder}"
            )


def parquet(path: Path) -> Any:
    """The open Parquet file. Its footer is read here, so that a truncated file is found at once."""
    import pyarrow as pa
    from pyarrow import parquet

    try:
        return parquet.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        raise damaged(path, error) from error


def batches(path: Path, columns: Sequence[str], rows: int) -> Iterator[Any]:
    """The named columns of a Parquet file as Arrow record batches of at most `rows` rows."""
    import pyarrow as pa

    file = parquet(path)
    if set(columns) - set(file.schema_arrow.names):
        raise ValueError(f"{path} must have the columns {list(columns)}, got {file.schema_arrow.names}")
    try:
        yield from file.iter_batches(rows, columns=list(columns))
    except (pa.ArrowException, OSError) as error:
        raise damaged(path, error) from error


def columns_of(paths: Sequence[Path], columns: Sequence[Column], rows: int = 1 << 14) -> list[Any]:
    """The result of each column over all rows of the Parquet files; see `cells.read_columns`."""
    return read_columns(paths, columns, batches, [parquet(path).metadata.num_rows for path in paths], rows)


def pictures(encoded: Sequence[bytes], shape: tuple[int, ...], where: object, first: int = 0) -> np.ndarray:
    """(n, *shape) uint8 from n encoded pictures (WebP, PNG or JPEG) of exactly that shape. where: their file, first:
    the row number of the first one, both for messages."""
    out = np.empty((len(encoded), *shape), dtype=np.uint8)

    def one(row: int) -> None:
        out[row] = picture(encoded[row], shape, f"picture {first + row} of {where}")

    with ThreadPoolExecutor(min(8, processors())) as threads:
        for _ in threads.map(one, range(len(encoded)), chunksize=64):
            pass
    return out


def picture(encoded: bytes, shape: tuple[int, ...], where: str) -> np.ndarray:
    """(channels, height, width) uint8 from one encoded picture: grey for one channel, RGB for three."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(encoded)) as image:
            pixels = np.asarray(image.convert("L" if shape[0] == 1 else "RGB"))
    except Exception as error:  # Pillow raises exceptions of many types on damaged bytes
        raise ValueError(f"{where} cannot be decoded ({error}); fetch its file again") from error
    pixels = pixels[None] if shape[0] == 1 else pixels.transpose(2, 0, 1)
    if pixels.shape != shape:
        raise ValueError(f"{where} must have shape {shape}, got {pixels.shape}")
    return pixels


def read_pictures(paths: list[Path], shape: tuple[int, ...]) -> Columns:
    """The columns "input" and "label" from Parquet files with the columns `image` (encoded) and `label`. Pictures are
    decoded while the files are read, so that the encoded ones are never all in memory."""
    images, labels = columns_of(paths, [Inputs("image", shape, pictures), Labels("label")], CHUNK)
    return {"input": images, "label": labels}

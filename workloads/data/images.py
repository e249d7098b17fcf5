"""Data sets in files under a data root, which are decoded once into the cache, and the decoding of pictures."""

from __future__ import annotations

import io
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
from pyarrow import parquet as pq

from ..files.cache import cached
from ..files.cells import Column, Inputs, Labels, read_columns
from ..files.roots import Found, Layout, damaged, locate, named
from ..processors import processors
from ..workload import Columns, Model, Partition
from .published import Published

CHUNK = 2000
"""Encoded pictures that are in memory at once."""

SMALL = 1 << 13
"""Pictures with fewer numbers than this are decoded in one thread: those of MNIST take 33 microseconds each, and 67 in
two threads, which wait for Python's lock."""

BYTES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX")
"""The modes of Pillow that become bytes, of brightness or of RGB, without loss if all pixels are opaque."""


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

    def data_files(self) -> Mapping[str, Path]:
        return {**super().data_files(), **({} if self.stand_in else named(self.folder, self.found().files))}

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
    try:
        return pq.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        raise damaged(path, error) from error


def batches(path: Path, columns: Sequence[str], rows: int) -> Iterator[Any]:
    """The named columns of a Parquet file as Arrow record batches of at most `rows` rows."""
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


def pictures(encoded: Sequence[bytes], shape: tuple[int, ...] | None, where: object, first: int = 0) -> np.ndarray:
    """(n, *shape) from n encoded pictures (WebP, PNG or JPEG) of exactly that shape, None for that of the first: uint8,
    or float32 in [0, 1] if they have 16 bits. where: their file, first: the row number of the first one, both for
    messages."""
    if shape is None:
        shape = shape_of(encoded[0], f"picture {first} of {where}")

    def one(row: int) -> np.ndarray:
        return picture(encoded[row], shape, f"picture {first + row} of {where}")

    def put(row: int) -> None:
        pixels = one(row)
        if pixels.dtype != out.dtype:
            raise ValueError(
                f"picture {first + row} of {where} must have as many bits as picture {first}, 8 or 16; save all with 16"
            )
        out[row] = pixels

    if not encoded:
        return np.empty((0, *shape), dtype=np.uint8)
    out = np.empty((len(encoded), *shape), dtype=one(0).dtype)
    if out[0].size < SMALL:
        for row in range(len(encoded)):
            put(row)
        return out
    with ThreadPoolExecutor(min(8, processors())) as threads:
        for _ in threads.map(put, range(len(encoded))):
            pass
    return out


def shape_of(encoded: bytes, where: str) -> tuple[int, int, int]:
    """(channels, height, width) of an encoded picture: one channel if it is grey, else three."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(encoded)) as image:
            grey = image.mode in ("1", "L", "LA") or is_grey_of_16_bits(image)
            return (1 if grey else 3, image.height, image.width)
    except Exception as error:  # Pillow raises exceptions of many types on damaged bytes
        raise ValueError(f"{where} cannot be decoded ({error}); fetch its file again") from error


def picture(encoded: bytes, shape: tuple[int, ...], where: str) -> np.ndarray:
    """(channels, height, width) from one encoded picture: for one channel its brightness, for three RGB. Grey pictures
    with 16 bits become float32 in [0, 1], all others uint8. Raises ValueError for a picture that cannot be read without
    loss, such as one with transparent pixels."""
    from PIL import Image

    pixels = np.empty(0)
    try:
        with Image.open(io.BytesIO(encoded)) as image:
            if not (loss := what_is_lost(image)):
                pixels = pixels_of(image, shape[0])
    except Exception as error:  # Pillow raises exceptions of many types on damaged bytes
        raise ValueError(f"{where} cannot be decoded ({error}); fetch its file again") from error
    if loss:
        raise ValueError(f"{where} {loss}")
    if pixels.shape != shape:
        raise ValueError(f"{where} must have shape {shape}, got {pixels.shape}; make all pictures of one size")
    return pixels


def what_is_lost(image: Any) -> str:
    """Why an open picture cannot be read without loss, and what to do; "" if it can."""
    mode = image.mode
    if mode not in BYTES and not is_grey_of_16_bits(image):
        return f"has the mode {mode}, which cannot be read without loss; save it as grey or RGB with 8 bits"
    if mode in BYTES and any(";16" in str(tile[3]) for tile in image.tile):  # Pillow drops half of the bits
        return f"has 16 bits in each channel of the mode {mode}; save it with 8 bits, or as grey with 16"
    if is_transparent(image):
        return f"has transparent pixels (mode {mode}), and networks get no transparency; lay it on a background"
    return ""


def is_grey_of_16_bits(image: Any) -> bool:
    return image.mode.startswith("I;16") or (image.mode == "I" and any("I;16" in str(tile[3]) for tile in image.tile))


def is_transparent(image: Any) -> bool:
    """Whether a pixel of an open picture is not opaque."""
    if image.mode not in ("LA", "PA", "RGBA") and "transparency" not in image.info:
        return False
    if image.mode not in BYTES:
        return bool((np.asarray(image) == image.info["transparency"]).any())
    return image.convert("RGBA").getchannel("A").getextrema()[0] < 255


def pixels_of(image: Any, channels: int) -> np.ndarray:
    """(channels, height, width): the pixels of an open picture, see `picture`."""
    if image.mode not in BYTES:
        grey = np.asarray(image).astype(np.float32) / 65535
        return np.repeat(grey[None], channels, 0)
    if "transparency" in image.info:  # all pixels are opaque
        image = image.convert("RGBA")
    mode = "L" if channels == 1 else "RGB"
    pixels = np.asarray(image if image.mode == mode else image.convert(mode))
    return pixels[None] if channels == 1 else pixels.transpose(2, 0, 1)


def read_pictures(paths: list[Path], shape: tuple[int, ...]) -> Columns:
    """The columns "input" and "label" from Parquet files with the columns `image` (encoded) and `label`. Pictures are
    decoded while the files are read, so that the encoded ones are never all in memory."""
    images, labels = columns_of(paths, [Inputs("image", shape, pictures), Labels("label")], CHUNK)
    return {"input": images, "label": labels}

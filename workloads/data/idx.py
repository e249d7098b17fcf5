"""Data sets that were published in the idx format, as MNIST was. torchvision's classes read them.

The data root is never written to. If it holds only the packed files, as they are published, they are unpacked once into
the cache folder.
"""

from __future__ import annotations

import gzip
import hashlib
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np

from ..files.cache import cache_folder, read_sealed, write_sealed
from ..files.roots import damaged, given_root, named
from ..files.vision import torchvision_datasets
from ..workload import Columns
from .published import Published


class File(NamedTuple):
    """`md5`: digest of the packed file, as in torchvision. `size`: bytes of the unpacked file."""

    md5: str
    size: int


class IdxSet(NamedTuple):
    """A data set that torchvision's class `name` reads from `folder`/`name`/raw. `files`: name -> File."""

    name: str
    folder: str
    files: dict[str, File]

    @property
    def raw(self) -> Path:
        return Path(self.name, "raw")

    @property
    def fetch(self) -> str:
        """The call that downloads the files, for messages."""
        return f"torchvision.datasets.{self.name}(root, download=True)"

    def place(self, data_root: str | None) -> Path:
        """The folder that torchvision calls the root: data_root/`folder` or data_root itself. Raises ValueError if
        files are missing in both."""
        root = given_root(data_root, f"{self.raw}/*.gz, which {self.fetch} fetches")
        places = [root / self.folder, root]
        for place in places:
            if not self.missing(place):
                return place
        nearest = next((place for place in places if (place / self.raw).is_dir()), root)
        raise ValueError(
            f"{self.name} needs the files {', '.join(self.missing(nearest))} (packed, .gz, or unpacked) in "
            f"{nearest / self.raw}, got no such files; fetch them with root={str(nearest)!r}: {self.fetch}"
        )

    def missing(self, place: Path) -> list[str]:
        """Names of files that are there neither packed nor unpacked."""
        raw = place / self.raw
        return [name for name in self.files if not (raw / name).is_file() and not (raw / f"{name}.gz").is_file()]

    def found(self, data_root: str | None) -> dict[str, Path]:
        """The files that are read, packed only where they are not there unpacked, by their names below `folder`."""
        raw = self.place(data_root) / self.raw
        paths = [raw / name if (raw / name).is_file() else raw / f"{name}.gz" for name in self.files]
        return named(self.folder, paths)

    def unpacked(self, place: Path) -> bool:
        return all((place / self.raw / name).is_file() for name in self.files)

    def verify(self, place: Path) -> None:
        """Raise ValueError unless each file is complete: packed files are checked by md5, unpacked ones by size."""
        for name, file in self.files.items():
            plain, packed = place / self.raw / name, place / self.raw / f"{name}.gz"
            if plain.is_file():
                path, whole = plain, plain.stat().st_size == file.size
            else:
                path, whole = packed, hashlib.md5(packed.read_bytes(), usedforsecurity=False).hexdigest() == file.md5
            if not whole:
                raise ValueError(
                    f"{path} must be the published file, got a truncated or different one of {path.stat().st_size} "
                    f"bytes; delete it and fetch it again: {self.fetch}"
                )

    def unpack(self, place: Path) -> Path:
        """Unpack every file into the cache and return the folder. Two processes may do so at once, because each file
        appears by a rename."""
        cache = cache_folder() / self.folder
        try:
            (cache / self.raw).mkdir(parents=True, exist_ok=True)
            for name, file in self.files.items():
                target = cache / self.raw / name
                if len(read_sealed(target) or b"") != file.size:
                    write_sealed(target, contents(place / self.raw / name))
        except OSError as error:
            raise ValueError(
                f"{cache} must be a folder that can be written to, got {error}; set FEDFLEET_CACHE to such a folder"
            ) from error
        return cache

    def read(self, root: Path, train: bool) -> Columns:
        images = getattr(torchvision_datasets(), self.name)(root, train=train)
        return {"input": images.data.numpy()[:, None], "label": images.targets.numpy()}


def contents(path: Path) -> bytes:
    """The bytes of a file; if only its packed form, path.gz, exists, it is unpacked."""
    return path.read_bytes() if path.is_file() else gzip.decompress(path.with_name(path.name + ".gz").read_bytes())


def numbers(path: Path, columns: int) -> np.ndarray:
    """(n, columns) int32: the integers in an idx file, packed or not; `path` is without .gz."""
    try:
        data = contents(path)
        kind, rows, width = np.frombuffer(data[:12], ">i4")
        if kind != 0x0C02 or width != columns or len(data) != 12 + 4 * rows * width:
            raise ValueError(f"{len(data)} bytes do not hold rows of {columns} integers")
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise damaged(path, error) from error
    return np.frombuffer(data[12:], ">i4").reshape(rows, width).astype(np.int32)


@dataclass(frozen=True)
class Idx(Published):
    """A set of images in the idx format: inputs (1, 28, 28) bytes, 10 classes. `data_root` may also be the root that
    torchvision uses."""

    published: ClassVar[IdxSet]
    classes: ClassVar[int] = 10
    full_rows: ClassVar[tuple[int, int] | None] = (60_000, 10_000)
    shape: ClassVar[tuple[int, ...]] = (1, 28, 28)

    def check_files(self) -> None:
        self.published.verify(self.published.place(self.data_root))

    def data_files(self) -> Mapping[str, Path]:
        return {**super().data_files(), **({} if self.stand_in else self.published.found(self.data_root))}

    def from_files(self) -> tuple[Columns, Columns]:
        self.check()
        place = self.published.place(self.data_root)
        root = place if self.published.unpacked(place) else self.published.unpack(place)
        return self.published.read(root, train=True), self.published.read(root, train=False)

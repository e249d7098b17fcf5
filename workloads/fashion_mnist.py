"""FashionMNIST: 28 x 28 grey images of clothing, 60,000 train and 10,000 test. Xiao et al. 2017, arXiv:1708.07747.

Read through torchvision's class, from the user's data root. The root is never written to: where it holds only the
packed files, as they are published, they are unpacked once into the cache folder ($FEDFLEET_CACHE, else
~/.cache/fedfleet).
"""

from __future__ import annotations

import gzip
import hashlib
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np

from .base import Classification, Columns, Model, Partition
from .models import LeNet
from .partitions import Iid
from .vision import torchvision_datasets


class File(NamedTuple):
    """`md5` of the packed file, as torchvision has it; `size` of the unpacked one in bytes."""

    md5: str
    size: int


FILES = {
    "train-images-idx3-ubyte": File("8d4fb7e6c68d591d4c3dfef9ec88bf0d", 16 + 60_000 * 784),
    "train-labels-idx1-ubyte": File("25c81989df183df01b3e8a0aad5dffbe", 8 + 60_000),
    "t10k-images-idx3-ubyte": File("bef4ecab320f06d8554ea6380940ec79", 16 + 10_000 * 784),
    "t10k-labels-idx1-ubyte": File("bb300cfdad3c16e7a12a480ee83cd310", 8 + 10_000),
}
RAW = Path("FashionMNIST", "raw")
FETCH = "torchvision.datasets.FashionMNIST(root, download=True)"


def given_root(data_root: str | None) -> Path:
    root = data_root or os.environ.get("FEDFLEET_DATA")
    if not root:
        raise ValueError(
            "data_root must name the folder of the data sets, got neither data_root nor FEDFLEET_DATA; "
            f"set one to a folder with {RAW}/*.gz, which {FETCH} fetches"
        )
    return Path(root).expanduser()


def set_folder(root: Path) -> Path:
    """The folder that torchvision would call the root: `root`/fashion_mnist or `root` itself."""
    folders = [root / "fashion_mnist", root]
    for folder in folders:
        if not missing(folder):
            return folder
    nearest = next((folder for folder in folders if (folder / RAW).is_dir()), root)
    raise ValueError(
        f"FashionMNIST wants {', '.join(missing(nearest))} (packed, .gz, or unpacked) in {nearest / RAW}, got no such "
        f"files; fetch them with root={str(nearest)!r}: {FETCH}"
    )


def missing(folder: Path) -> list[str]:
    """Names of files that are there neither packed nor unpacked."""
    raw = folder / RAW
    return [name for name in FILES if not (raw / name).is_file() and not (raw / f"{name}.gz").is_file()]


def unpacked(folder: Path) -> bool:
    return all((folder / RAW / name).is_file() for name in FILES)


def verify(folder: Path) -> None:
    """Raise unless each file is whole: packed ones by md5, unpacked ones by size."""
    for name, file in FILES.items():
        plain, packed = folder / RAW / name, folder / RAW / f"{name}.gz"
        if plain.is_file():
            path, whole = plain, plain.stat().st_size == file.size
        else:
            path, whole = packed, hashlib.md5(packed.read_bytes(), usedforsecurity=False).hexdigest() == file.md5
        if not whole:
            raise ValueError(
                f"{path} must be the published file, got a truncated or different one of {path.stat().st_size} bytes; "
                f"delete it and fetch it again: {FETCH}"
            )


def cache_folder() -> Path:
    return Path(os.environ.get("FEDFLEET_CACHE") or "~/.cache/fedfleet").expanduser() / "fashion_mnist"


def unpack(folder: Path) -> Path:
    """The cache folder with every file unpacked. Two processes may do it at once: each file appears by a rename."""
    cache = cache_folder()
    try:
        (cache / RAW).mkdir(parents=True, exist_ok=True)
        for name, file in FILES.items():
            target = cache / RAW / name
            if not target.is_file() or target.stat().st_size != file.size:
                write_whole(target, contents(folder / RAW / name))
    except OSError as error:
        raise ValueError(
            f"{cache} must be a folder that can be written to, got {error}; set FEDFLEET_CACHE to such a folder"
        ) from error
    return cache


def contents(path: Path) -> bytes:
    """A verified file's bytes, unpacked where only the packed file is there."""
    return path.read_bytes() if path.is_file() else gzip.decompress(path.with_name(path.name + ".gz").read_bytes())


def write_whole(target: Path, data: bytes) -> None:
    """Write beside and rename: a reader finds the whole file or none."""
    handle, beside = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(beside, target)
    except BaseException:
        os.unlink(beside)
        raise


@dataclass(frozen=True)
class FashionMnist(Classification):
    """Inputs (1, 28, 28) bytes, 10 classes. `data_root`: a folder with FashionMNIST/raw, or with
    fashion_mnist/FashionMNIST/raw; $FEDFLEET_DATA where it is not given."""

    model: Model = LeNet()
    partition: Partition = Iid()
    data_root: str | None = None

    classes: ClassVar[int] = 10
    shape: ClassVar[tuple[int, ...]] = (1, 28, 28)
    mean: ClassVar[tuple[float, ...]] = (0.2860,)
    std: ClassVar[tuple[float, ...]] = (0.3530,)

    def check(self) -> None:
        super().check()
        verify(set_folder(given_root(self.data_root)))

    def load(self) -> tuple[Columns, Columns]:
        self.check()
        folder = set_folder(given_root(self.data_root))
        root = folder if unpacked(folder) else unpack(folder)
        return read(root, train=True), read(root, train=False)


def read(root: Path, train: bool) -> Columns:
    images = torchvision_datasets().FashionMNIST(root, train=train)
    return {"input": np.array(images.data)[:, None], "label": np.array(images.targets)}

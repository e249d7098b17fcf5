"""Decoded data sets, kept as .npy files in $FEDFLEET_CACHE (else ~/.cache/fedfleet), so that a second start is quick.

An entry is a folder named after a digest of the source files and of what was made of them. It is written beside and
renamed: two processes may do it at once, and a reader finds all of it or none. Nothing in it is ever pickled.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from .base import Columns

VERSION = "1"
"""Raised where the same files are decoded to something else."""

MANY = 100
"""Files from which on names, sizes and times stand for the contents: 100,000 small images take minutes to read."""

Splits = tuple[Columns, Columns]


def cache_folder() -> Path:
    return Path(os.environ.get("FEDFLEET_CACHE") or "~/.cache/fedfleet").expanduser()


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


def cached(name: str, settings: str, files: Iterable[Path], make: Callable[[], Splits]) -> Splits:
    """(train, test) as `make` decodes them from `files`, from the cache where they are there already."""
    folder = cache_folder() / name / digest(list(files), settings)
    if folder.is_dir():
        try:
            return read(folder / "train"), read(folder / "test")
        except (OSError, ValueError, EOFError):  # damaged from outside: made anew
            shutil.rmtree(folder, ignore_errors=True)
    splits = make()
    try:
        keep(folder, splits)
    except OSError as error:
        raise ValueError(
            f"{cache_folder()} must be a folder that can be written to, got {error}; "
            "set FEDFLEET_CACHE to such a folder"
        ) from error
    return splits


def digest(files: list[Path], settings: str) -> str:
    whole = hashlib.blake2b(f"{VERSION}\0{settings}".encode(), digest_size=16)
    for path in files:
        whole.update(f"\0{path.name}\0".encode())
        if len(files) > MANY:
            about = path.stat()
            whole.update(f"{path.parent.name}\0{about.st_size}\0{about.st_mtime_ns}".encode())
        else:
            with path.open("rb") as file:
                while block := file.read(1 << 20):
                    whole.update(block)
    return whole.hexdigest()


def read(folder: Path) -> Columns:
    columns = {path.stem: np.load(path, allow_pickle=False) for path in sorted(folder.glob("*.npy"))}
    if "label" not in columns or len({len(column) for column in columns.values()}) != 1:
        raise ValueError(f"{folder} has columns of unequal length")
    return columns


def keep(folder: Path, splits: Splits) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=".", dir=folder.parent))
    try:
        for part, columns in zip(("train", "test"), splits, strict=True):
            (beside / part).mkdir()
            for name, column in columns.items():
                np.save(beside / part / f"{name}.npy", column, allow_pickle=False)
        try:
            os.replace(beside, folder)
        except OSError:
            if not folder.is_dir():  # else another process was first
                raise
    finally:
        shutil.rmtree(beside, ignore_errors=True)

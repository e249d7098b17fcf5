"""A cache of decoded data sets, as .npy files in $FEDFLEET_CACHE (by default ~/.cache/fedfleet).

An entry is a folder whose name is a digest of the source files and of the settings of decoding. It is written under
another name and then renamed, so two processes may write the same entry at once, and a reader finds all of an entry or
none of it. Nothing in the cache is a pickle.
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
"""Part of every digest. Increase it when a change makes the same files decode to other columns."""

MANY = 100
"""With more files than this, the digest is of their names, sizes and times and not of their contents: to read 100,000
small images takes minutes."""

Splits = tuple[Columns, Columns]
"""The columns of (train, test)."""


def cache_folder() -> Path:
    """The root of the cache; it need not exist."""
    return Path(os.environ.get("FEDFLEET_CACHE") or "~/.cache/fedfleet").expanduser()


def write_whole(target: Path, data: bytes) -> None:
    """Write a file under another name and rename it, so that a reader finds all of it or none of it."""
    handle, beside = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(beside, target)
    except BaseException:
        os.unlink(beside)
        raise


def cached(name: str, settings: str, files: Iterable[Path], make: Callable[[], Splits]) -> Splits:
    """The columns of (train, test) that `make()` decodes from `files`, from the cache if they are there.

    `name`: folder of the data set in the cache. `settings`: what the result depends on besides the files. Raises
    ValueError if the cache cannot be written.
    """
    folder = cache_folder() / name / digest(list(files), settings)
    if folder.is_dir():
        try:
            return read(folder / "train"), read(folder / "test")
        except (OSError, ValueError, EOFError):  # a damaged entry is written again
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
    """32 hexadecimal digits that depend on the settings and on the files; see MANY."""
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
    """The columns in a folder of .npy files; ValueError if they are damaged."""
    columns = {path.stem: np.load(path, allow_pickle=False) for path in sorted(folder.glob("*.npy"))}
    if "label" not in columns or len({len(column) for column in columns.values()}) != 1:
        raise ValueError(f"{folder} must have columns of equal length, one of them label, got {sorted(columns)}")
    return columns


def keep(folder: Path, splits: Splits) -> None:
    """Write an entry; an entry that another process wrote meanwhile stays."""
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
            if not folder.is_dir():  # otherwise another process was first
                raise
    finally:
        shutil.rmtree(beside, ignore_errors=True)

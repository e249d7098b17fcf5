"""A cache of decoded data sets, as .npy files in $FEDFLEET_CACHE (by default ~/.cache/fedfleet).

An entry is a folder whose name is a digest of the source files and of the settings of decoding. It is written under
another name and then renamed, so two processes may write the same entry at once, and a reader finds all of an entry or
none of it. Nothing in the cache is a pickle.

Whatever is read from the cache is compared with the digest that it had when it was written, each time, which takes less
time than reading it. What differs is made again from the source files, and the log of the run says so.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from ..workload import Columns, note

VERSION = "2"
"""Part of every digest. Increase it when a change makes the same files decode to other columns."""

MANY = 100
"""With more files than this, the digest is of their names, sizes and times and not of their contents: to read 100,000
small images takes minutes."""

DIGESTS = "digests.json"
"""The file of an entry with the digests of its columns."""

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
            return read(folder)
        except Exception as error:  # of whatever kind NumPy raises on damaged bytes
            note(f"data: {folder} is damaged ({first_line(error)}); its files are decoded again")
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
        folder, name = os.path.split(path)  # pathlib takes five times as long
        whole.update(f"\0{name}\0".encode())
        if len(files) > MANY:
            about = os.stat(path)
            whole.update(f"{os.path.basename(folder)}\0{about.st_size}\0{about.st_mtime_ns}".encode())
        else:
            with path.open("rb") as file:
                while block := file.read(1 << 20):
                    whole.update(block)
    return whole.hexdigest()


def read(folder: Path) -> Splits:
    """The columns of (train, test) of an entry. Raises ValueError, or what NumPy raises, if it is damaged."""
    digests = json.loads((folder / DIGESTS).read_text("utf-8"))
    train, test = (read_part(folder / part, digests[part]) for part in ("train", "test"))
    return train, test


def read_part(folder: Path, digests: dict[str, str]) -> Columns:
    """The columns in a folder of .npy files. digests: of each of them."""
    columns = {}
    for name, expected in digests.items():
        path = folder / f"{name}.npy"
        if not path.is_file():  # reading a FIFO would wait for ever
            raise ValueError(f"{folder.name}/{path.name} is missing")
        columns[name] = np.load(path, allow_pickle=False)
        if digest_of(columns[name]) != expected:
            raise ValueError(f"{folder.name}/{path.name} is not what was written")
    return columns


def digest_of(column: np.ndarray) -> str:
    """A text that depends on the type, the shape and the bytes of a column."""
    content = np.ascontiguousarray(column).reshape(-1).view(np.uint8)
    return f"{column.dtype.str} {column.shape} {xxhash.xxh3_128_hexdigest(content.data)}"


def first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


def write_sealed(target: Path, data: bytes) -> None:
    """Write a file of the cache, and its digest before it."""
    seal = seal_of(target)
    seal.parent.mkdir(parents=True, exist_ok=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    write_whole(seal, xxhash.xxh3_128_hexdigest(data).encode())
    write_whole(target, data)


def read_sealed(target: Path) -> bytes | None:
    """The content of a file that `write_sealed` has written; None if there is none, or if it is damaged."""
    try:
        expected = seal_of(target).read_bytes() if target.is_file() else None
    except OSError:  # it was written by an earlier version
        return None
    if expected is None:
        return None
    data = target.read_bytes()
    if xxhash.xxh3_128_hexdigest(data).encode() == expected:
        return data
    note(f"data: {target} is damaged; it is made again")
    return None


def seal_of(target: Path) -> Path:
    """The file with the digest of a file in the cache."""
    return cache_folder() / "digests" / target.relative_to(cache_folder())


def keep(folder: Path, splits: Splits) -> None:
    """Write an entry; an entry that another process wrote meanwhile stays."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=".", dir=folder.parent))
    try:
        digests: dict[str, Any] = {}
        for part, columns in zip(("train", "test"), splits, strict=True):
            (beside / part).mkdir()
            for name, column in columns.items():
                np.save(beside / part / f"{name}.npy", column, allow_pickle=False)
            digests[part] = {name: digest_of(np.asarray(column)) for name, column in columns.items()}
        (beside / DIGESTS).write_text(json.dumps(digests), encoding="utf-8")
        try:
            os.replace(beside, folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process was first
                raise
    finally:
        shutil.rmtree(beside, ignore_errors=True)

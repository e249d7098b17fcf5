"""Facts about the content of large files, kept in the cache folder, so that each file is read for them once.

A file counts as the same by its path, its size and the times of its last change: that of its content, which programs
may set, as those do that unpack archives, and that of its entry in the file system, which none can set. A file whose
content was changed within the last two seconds is read again next time: it could be changed once more without another
time.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from .atomic_write import write
from .expanded import cache_folder
from .sha256 import sha256_of_json

RECENT = 2.0
"""Seconds since its last change in which a file may change again unnoticed."""


def known(files: Iterable[Path], settings: Any, find: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `find()` gives, or gave before for the same files and settings, as JSON has it.

    An entry of the cache that is damaged is made again, and without a folder that can be written nothing is kept.
    """
    paths = sorted(path.resolve() for path in files)
    before = marks(paths)
    key = sha256_of_json([[str(path) for path in paths], before, settings])
    file = cache_folder() / "digests" / f"{key[:32]}.json"
    with suppress(OSError, ValueError, KeyError, TypeError):
        entry = json.loads(file.read_text("utf-8"))
        if entry["sha256"] == sha256_of_json(entry["facts"]) and isinstance(entry["facts"], dict):
            return entry["facts"]
    facts = find()
    if marks(paths) == before and all(time.time() - changed / 1e9 > RECENT for _, changed, _ in before):
        with suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            write(file, json.dumps({"facts": facts, "sha256": sha256_of_json(facts)}))
    return facts


def marks(paths: Iterable[Path]) -> list[tuple[int, int, int]]:
    """(bytes, times of the last change in ns, of the content and of the entry) of each file."""
    return [(found.st_size, found.st_mtime_ns, found.st_ctime_ns) for found in (path.stat() for path in paths)]

"""Where a run's files may go, and their removal where the experiment turns out to be impossible."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..engine.errors import ConfigError


def check_out(out: Path) -> None:
    """Refuse a folder that could not be made, before anything is computed."""
    there = next(path for path in (out.absolute(), *out.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise ConfigError(f"--out {out}: {there} is not a folder that can be written to; choose another")


@contextmanager
def nothing_left(folder: Path) -> Iterator[None]:
    """On a ConfigError, the folder and its parents are again as they were."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    held = set(folder.iterdir()) if folder.is_dir() else set()
    try:
        yield
    except ConfigError:
        for file in set(folder.iterdir()) - held if folder.is_dir() else ():
            shutil.rmtree(file) if file.is_dir() else file.unlink()
        with suppress(OSError):
            for path in made:
                path.rmdir()
        raise

"""Files that are whole or not there."""

import errno
import os
from contextlib import suppress
from pathlib import Path


def beside(path: Path) -> Path:
    """Where `write` puts what is not whole yet."""
    return path.with_name(f".{path.name}")


def write(path: Path, text: str) -> None:
    """All of it or, if the process is killed, what was there before."""
    beside(path).write_text(text, encoding="utf-8")
    beside(path).replace(path)


# --- room on the disk -------------------------------------------------------------------------------------------------
RESERVE = ".reserve"


def reserve(folder: Path, count: int) -> None:
    """Take so many bytes of the folder's disk, for what is written when a run ends. OSError where there are fewer."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / RESERVE).open("wb") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, count)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                release(folder)
                raise  # others come from file systems that cannot do it


def release(folder: Path) -> None:
    """Give it back."""
    with suppress(OSError):
        (folder / RESERVE).unlink()

"""Files that are complete or absent, and disk space that is reserved for them."""

import errno
import os
from contextlib import suppress
from pathlib import Path


def temporary_path(path: Path) -> Path:
    """The file in the same folder that `write` fills before it renames it to `path`."""
    return path.with_name(f".{path.name}")


def write(path: Path, text: str, private: bool = False) -> None:
    """Replace the content of a file. If the process is killed meanwhile, the old content remains. private: whether only
    this user may read the file."""
    if private:
        temporary_path(path).unlink(missing_ok=True)
        temporary_path(path).touch(mode=0o600)
    temporary_path(path).write_text(text, encoding="utf-8")
    temporary_path(path).replace(path)


# --- disk space -------------------------------------------------------------------------------------------------------
RESERVE = ".reserve"


def reserve(folder: Path, count: int) -> None:
    """Reserve `count` bytes of the folder's disk for the files that are written when a run ends.

    Raises OSError if the disk has fewer free bytes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / RESERVE).open("wb") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, count)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                release(folder)
                raise  # all other errors come from file systems that cannot reserve space


def release(folder: Path) -> None:
    """Give the reserved space back."""
    with suppress(OSError):
        (folder / RESERVE).unlink()

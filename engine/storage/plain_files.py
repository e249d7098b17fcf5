"""Files in folders that other users may be able to write to, such as the folders of runs.

Only plain files are opened there. A symbolic link is not followed, because whoever placed it could choose what is
written to, or read, in the name of the user who runs the command. A FIFO, a socket or a device is refused, because
reading it may never end.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from ..errors import ConfigError

KINDS = (
    (stat.S_ISLNK, "a symbolic link"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def open_plain(path: Path | str, flags: int, mode: int = 0o666) -> int:
    """The handle of a plain file, opened with these flags of `os.open`; with O_CREAT it is made with these permissions.

    Raises OSError, with a reason that fits into a sentence, for everything that is not a plain file. It never waits for
    the other end of a FIFO.
    """
    try:
        handle = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    except OSError as error:
        if kind := unusual_kind(path):
            raise OSError(error.errno, f"it is {kind}, where a plain file must be", str(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, f"it is {unusual_kind(path) or 'a folder'}, where a plain file must be", str(path))
    return handle


def read_text(path: Path, errors: str = "strict") -> str:
    """The text of a plain file in UTF-8. errors: as in `open`. Raises OSError, or UnicodeDecodeError."""
    with os.fdopen(open_plain(path, os.O_RDONLY), encoding="utf-8", errors=errors) as file:
        return file.read()


def make_folder(path: Path) -> None:
    """Make a folder, and those above it, if it is missing. Raises OSError if something else, or a link, is there."""
    if kind := unusual_kind(path):
        raise OSError(errno.ENOTDIR, f"it is {kind}, where a folder must be", str(path))
    path.mkdir(parents=True, exist_ok=True)


def unusual_kind(path: Path | str) -> str:
    """ "a symbolic link", "a FIFO", "a socket" or "a device" if there is one at the path; else ""."""
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return ""
    return next((kind for is_kind, kind in KINDS if is_kind(mode)), "")


def refuse_unusual(folder: Path, names: Iterable[str]) -> None:
    """Raise ConfigError if one of the entries `names` of a folder, or anything below them, is neither a plain file nor
    a folder."""
    for path in (folder / name for name in names):
        for found in (path, *_below(path)):
            if kind := unusual_kind(found):
                raise ConfigError(
                    f"{found} is {kind}, and only plain files and folders are used there; put the file or the folder "
                    "itself in its place, or remove it"
                )


def _below(path: Path) -> Iterator[Path]:
    """Everything in a folder and its sub-folders; nothing for other paths. Links are not followed."""
    if path.is_symlink() or not path.is_dir():
        return
    for folder, folders, files in os.walk(path):
        for name in (*folders, *files):
            yield Path(folder) / name

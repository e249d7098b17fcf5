"""Files that are complete or absent, and disk space that is reserved for them."""

import errno
import os
from contextlib import suppress
from pathlib import Path

from .plain_files import open_plain


def temporary_path(path: Path) -> Path:
    """The file in the same folder that `write` fills before it renames it to `path`."""
    return path.with_name(f".{path.name}")


def write(path: Path, content: str | bytes, private: bool = False, on_disk: bool = False) -> None:
    """Replace the content of a file. If the process is killed meanwhile, or there is no room, the old content remains.

    private: whether only this user may read the file. on_disk: whether to wait until the file, and its name in the
    folder, are on the disk.
    """
    data = content.encode() if isinstance(content, str) else content
    temporary = cleared(temporary_path(path))
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    try:
        with os.fdopen(open_plain(temporary, flags, 0o600 if private else 0o666), "wb") as file:
            file.write(data)
            if on_disk:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        error.filename = error.filename or str(path)  # writing to an open file names none
        raise
    if on_disk:
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Have the names of the files in a folder on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def cleared(path: Path) -> Path:
    """The path, after the file or the link that was there has been removed."""
    path.unlink(missing_ok=True)
    return path


# --- disk space -------------------------------------------------------------------------------------------------------
RESERVE = ".reserve"


def allocate(file: int, begin: int, count: int) -> None:
    """Reserve the disk blocks of `count` bytes from the byte `begin` of an open file, which grows if it is shorter. On
    macOS, which has no such call, the free space is compared. Raises OSError if the disk has fewer free bytes, or, on
    Linux, if the file system cannot reserve any."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, begin, count)
        return
    disk = os.fstatvfs(file)
    if disk.f_bavail * disk.f_frsize < count:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.ftruncate(file, max(os.fstat(file).st_size, begin + count))


def reserve(folder: Path, count: int) -> None:
    """Reserve `count` bytes of the folder's disk for the files that are written when a run ends.

    Raises OSError if the disk has fewer free bytes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = open_plain(cleared(folder / RESERVE), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        allocate(file, 0, count)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            release(folder)
            raise  # all other errors come from file systems that cannot reserve space
    finally:
        os.close(file)


def release(folder: Path) -> None:
    """Give the reserved space back."""
    with suppress(OSError):
        (folder / RESERVE).unlink()

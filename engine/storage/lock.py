"""A lock on a folder, so that only one process at a time writes there.

It is a lock of the kernel (`flock` on a file in the folder), so it is released when its holder dies, even by SIGKILL.
The content of the file names the process and the machine that hold the lock; it is used in messages only. On a network
file system the same call works between machines if the server supports locks.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import stat
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..errors import ConfigError, InUse
from .plain_files import open_plain, read_text

LOCKED_ELSEWHERE = (errno.EWOULDBLOCK, errno.EACCES)
POLL_SECONDS = 0.05
LAUNCHER, DRIVER = ".run.lock", ".driver.lock"
ORPHAN_SECONDS = 20.0
"""The longest wait for the driver of a launcher that was killed: Ray ends such a driver within a few seconds."""


class Lock:
    """A lock file. `supported` is False if the file system has no locks, so that no process is kept out."""

    def __init__(self, path: Path) -> None:
        self.path, self.supported = path, True
        self.file: int | None = None

    def take(self) -> bool:
        """Try to take the lock; returns whether this process holds it now.

        The file is not changed if another process holds the lock. Raises OSError if the file cannot be created, or if
        the path holds something else than a plain file.
        """
        while True:
            file = open_plain(self.path, os.O_RDWR | os.O_CREAT)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in LOCKED_ELSEWHERE:
                    os.close(file)
                    return False
                self.supported = False
            if self._is_still(file):
                break
            os.close(file)  # the previous holder removed the file after it was opened here
        self.file = file
        HELD_LOCKS.add(self)
        with suppress(OSError):  # on a full disk the file stays empty and messages name no process
            os.ftruncate(file, 0)
            os.pwrite(file, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)
        return True

    def wait(self, seconds: float, check: Callable[[], None] = lambda: None) -> bool:
        """Repeat `take` until it succeeds or the time is over; returns whether it succeeded.

        `check`: called between the attempts; it may raise an exception.
        """
        deadline = time.monotonic() + seconds
        while not self.take():
            if time.monotonic() > deadline:
                return False
            check()
            time.sleep(POLL_SECONDS)
        return True

    def _is_still(self, file: int) -> bool:
        """Whether the open file is still the one at the path."""
        try:
            current = os.lstat(self.path)
        except FileNotFoundError:
            return False
        return os.path.samestat(current, os.fstat(file))

    def release(self) -> None:
        """Remove the file, then release the lock.

        A process that opened the file in between finds that the path no longer names it.
        """
        if self.file is None:
            return
        with suppress(OSError):
            if self._is_still(self.file):
                os.unlink(self.path)
        self._close()

    def _close(self) -> None:
        if self.file is not None:
            os.close(self.file)
        self.file = None
        HELD_LOCKS.discard(self)

    def holder(self) -> str:
        """The process that holds the lock, as far as the file names it."""
        try:
            content = json.loads(read_text(self.path))
            return f"process {int(content['pid'])} on {content['host']}"
        except (OSError, ValueError, TypeError, KeyError):
            return "another process"


HELD_LOCKS: weakref.WeakSet[Lock] = weakref.WeakSet()


def _forget_locks_after_fork() -> None:
    """A forked child shares the locks of its parent, and would hold them after the parent has died."""
    for lock in list(HELD_LOCKS):
        lock._close()


os.register_at_fork(after_in_child=_forget_locks_after_fork)


def in_use_error(folder: Path, lock: Lock) -> InUse:
    """The error for a folder whose lock another process holds."""
    return InUse(f"{folder} is in use by {lock.holder()}; wait until it ends, or choose another folder")


@contextmanager
def exclusive(folder: Path, name: str) -> Iterator[Lock]:
    """Holds the lock `name` of the folder, which is created if it does not exist.

    Raises InUse if another process holds the lock, ConfigError if the folder cannot be written to. Folders that were
    created here are removed at the end if they are empty.
    """
    made: list[Path] = []
    lock = Lock(folder / name)
    try:
        while True:
            made += make_folders(folder)
            try:
                taken = lock.take()
                break
            except FileNotFoundError:
                continue  # another process created the folder, failed, and removed it
    except OSError as error:
        remove_empty(made)
        raise ConfigError(f"{folder} cannot be written to ({error.strerror}); choose another folder") from None
    if not taken:
        refusal = in_use_error(folder, lock)
        remove_empty(made)
        raise refusal
    try:
        yield lock
    finally:
        lock.release()
        remove_empty(made)


@contextmanager
def driver_lock(
    directory: str | Path | None, check: Callable[[], None] = lambda: None, seconds: float = ORPHAN_SECONDS
) -> Iterator[None]:
    """Holds the lock of the driver of the run in this folder; does nothing without a folder.

    Waits up to `seconds` for another driver to end, then raises InUse. `check`: called during the wait; it may
    raise an exception.
    """
    if directory is None:
        yield
        return
    folder = Path(directory)
    make_folders(folder)  # a driver on a node of its own may not have the folder yet
    lock = Lock(folder / DRIVER)
    if not lock.wait(seconds, check):
        raise in_use_error(folder, lock)
    try:
        yield
    finally:
        lock.release()


def make_folders(folder: Path) -> list[Path]:
    """Create a folder and its parents. Returns the folders that this process created, the outermost first."""
    made: list[Path] = []
    while not folder.is_dir():
        inner = folder
        while not inner.parent.exists():
            inner = inner.parent
        try:
            inner.mkdir()
            made.append(inner)
        except FileExistsError:  # another process created it first, and may have removed it again
            if not _is_folder_or_gone(inner):
                raise
        except FileNotFoundError:  # another process has removed the parent
            continue
    return made


def _is_folder_or_gone(path: Path) -> bool:
    """Whether the path is a folder, or a link to one, or does not exist.

    It is looked at once: of two looks, a process that removes and makes the folder in between would spoil the answer. A
    link to nothing is no folder, and `mkdir` will never replace it.
    """
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return True
    return path.is_dir() if stat.S_ISLNK(mode) else stat.S_ISDIR(mode)


def remove_empty(folders: list[Path]) -> None:
    """Remove the folders that are empty, the innermost first."""
    for folder in reversed(folders):
        with suppress(OSError):
            folder.rmdir()

"""A lock on a folder, so that one process at a time writes there.

The lock is the kernel's (`flock` on a file in the folder), so it is released when its holder dies, even by SIGKILL.
The file says which process on which machine holds it; that is for messages only. On file systems of a network the same
call works between machines where the server has locks at all.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..errors import ConfigError, InUse

HELD_ELSEWHERE = (errno.EWOULDBLOCK, errno.EACCES)
LOOK_SECONDS = 0.05
LAUNCHER, DRIVER = ".run.lock", ".driver.lock"
ORPHAN_SECONDS = 20.0
"""How long to wait for the driver of a launcher that was killed: Ray ends it within a few seconds."""


class Lock:
    """`supported`: False where the file system has no locks, so that nobody is kept out."""

    def __init__(self, path: Path) -> None:
        self.path, self.supported = path, True
        self.file: int | None = None

    def take(self) -> bool:
        """Whether this process has it now. The file is not changed where another process holds the lock. OSError where
        the file cannot be made."""
        while True:
            file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in HELD_ELSEWHERE:
                    os.close(file)
                    return False
                self.supported = False
            if self._is_still(file):
                break
            os.close(file)  # its last holder removed it after we had opened it
        self.file = file
        HELD.add(self)
        with suppress(OSError):  # on a full disk the message names no process
            os.ftruncate(file, 0)
            os.pwrite(file, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)
        return True

    def wait(self, seconds: float, check: Callable[[], None] = lambda: None) -> bool:
        """`take`, again until it succeeds or the time is over. check: called meanwhile; it may raise."""
        deadline = time.monotonic() + seconds
        while not self.take():
            if time.monotonic() > deadline:
                return False
            check()
            time.sleep(LOOK_SECONDS)
        return True

    def _is_still(self, file: int) -> bool:
        """Whether the open file is the one that the path names."""
        try:
            there = os.stat(self.path)
        except FileNotFoundError:
            return False
        return os.path.samestat(there, os.fstat(file))

    def release(self) -> None:
        """Remove the file, then let go: whoever opened it in between finds that it is not the path's any more."""
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
        HELD.discard(self)

    def holder(self) -> str:
        """Which process holds it, as far as the file says so."""
        try:
            said = json.loads(self.path.read_text("utf-8"))
            return f"process {int(said['pid'])} on {said['worker']}"
        except (OSError, ValueError, TypeError, KeyError):
            return "another process"


HELD: weakref.WeakSet[Lock] = weakref.WeakSet()


def _forget() -> None:
    """A child of a fork shares its parent's lock, and would keep it when the parent dies."""
    for lock in list(HELD):
        lock._close()


os.register_at_fork(after_in_child=_forget)


def in_use(folder: Path, lock: Lock) -> InUse:
    return InUse(f"{folder} is in use by {lock.holder()}; wait until it ends, or choose another folder")


@contextmanager
def alone(folder: Path, name: str) -> Iterator[Lock]:
    """Nobody else has the lock `name` of the folder meanwhile, which is made where there is none.

    Raises InUse where another process has it, ConfigError where nothing can be written there. Folders that were made
    here are removed if nothing was put into them.
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
                continue  # another process made the folder, failed, and removed it
    except OSError as error:
        remove_empty(made)
        raise ConfigError(f"{folder} cannot be written to ({error.strerror}); choose another folder") from None
    if not taken:
        refusal = in_use(folder, lock)
        remove_empty(made)
        raise refusal
    try:
        yield lock
    finally:
        lock.release()
        remove_empty(made)


@contextmanager
def driving(directory: str | Path | None, check: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Nobody else is the driver of the run in this folder meanwhile. InUse where another one does not end soon; check:
    is called while it waits for that one, and may raise."""
    if directory is None:
        yield
        return
    folder = Path(directory)
    make_folders(folder)  # on a driver's node of its own there may be none
    lock = Lock(folder / DRIVER)
    if not lock.wait(ORPHAN_SECONDS, check):
        raise in_use(folder, lock)
    try:
        yield
    finally:
        lock.release()


def make_folders(folder: Path) -> list[Path]:
    """Make a folder and its parents; those that this process has made, the outermost first."""
    made: list[Path] = []
    while not folder.is_dir():
        inner = folder
        while not inner.parent.exists():
            inner = inner.parent
        try:
            inner.mkdir()
            made.append(inner)
        except FileExistsError:  # another process was first, unless it is a file
            if not inner.is_dir():
                raise
        except FileNotFoundError:  # another process has removed the parent
            continue
    return made


def remove_empty(folders: list[Path]) -> None:
    """Remove those of the folders that are empty, the innermost first."""
    for folder in reversed(folders):
        with suppress(OSError):
            folder.rmdir()

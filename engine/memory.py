"""Memory that runs out: how it is recognised, and what a user is told of it."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    pass

SAID = ("can't allocate memory", "not enough memory", "out of memory", "bad_alloc", "Cannot allocate memory")
"""What allocators say in exceptions that are of no type of their own."""
BOUND = threading.RLock()
"""Of the process's limit: two threads that change it at once could leave it changed."""


def exhausted(error: BaseException) -> bool:
    """Whether an exception says that memory could not be had."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(text in str(error) for text in SAID)


def give_back() -> None:
    """Memory that a task which failed for want of it still holds: frames of its exception refer to each other, and what
    is freed is kept (`worker.keep_freed_memory`) in pieces of the wrong sizes."""
    gc.collect()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


@contextmanager
def bounded() -> Iterator[None]:
    """Meanwhile this process gets no more address space than there is memory available. Linux grants more than it has
    and kills processes that use it; a bound makes an allocation fail instead, which can be told. Where there are GPUs
    there is no bound: their drivers reserve address space that they do not use."""
    room = None if torch.cuda.is_available() else available()
    if room is None:
        yield
        return
    with BOUND:
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * os.sysconf("SC_PAGE_SIZE") + room
        resource.setrlimit(resource.RLIMIT_AS, (limit if soft == resource.RLIM_INFINITY else min(limit, soft), hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def available(system: Path = Path("/proc/meminfo"), groups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes that this process could still have: the machine's, or those of its control group if that has fewer; None
    where the system does not say."""
    try:
        (line,) = (line for line in system.read_text().splitlines() if line.startswith("MemAvailable:"))
        found = 1024 * int(line.split()[1])
    except (OSError, ValueError):
        return None
    for folder, limit, used in (
        (groups, "memory.max", "memory.current"),
        (groups / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        with suppress(OSError, ValueError):
            taken = int((folder / used).read_text()) - cached_files(folder / "memory.stat")
            found = min(found, int((folder / limit).read_text()) - taken)
    return max(found, 0)


def cached_files(statistics: Path) -> int:
    """Bytes of a control group's usage that are copies of files, which the kernel gives up when memory is wanted.

    Without them a group that has read many files would look full, although its processes need little.
    """
    found = {}
    with suppress(OSError, ValueError):
        for line in statistics.read_text().splitlines():
            name, _, value = line.partition(" ")
            found[name.removeprefix("total_")] = int(value)  # those of the first version count groups below with it
    return found.get("active_file", 0) + found.get("inactive_file", 0)


def first_line(error: BaseException) -> str:
    text = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {text}"[:300] if text else type(error).__name__

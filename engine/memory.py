"""Memory that runs out: how it is recognised, how it is bounded, and how much there is; values that are kept in it."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import resource
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Generic, TypeVar

import torch

DEVICE_MESSAGES = ("CUDA out of memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""Parts of the messages of libraries that cannot allocate memory of a device."""
ALLOCATOR_MESSAGES = (
    *DEVICE_MESSAGES,
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "bad_alloc",
    "Cannot allocate memory",
)
"""Parts of the messages of allocators that raise a plain RuntimeError."""
LIMIT_LOCK = threading.RLock()
"""Held while the limit of the process is changed: two threads that change it at once could leave it changed."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory could not be allocated."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(text in str(error) for text in ALLOCATOR_MESSAGES)


def is_device_full(error: BaseException) -> bool:
    """Whether an exception says that memory of a device, such as a GPU, could not be allocated."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in DEVICE_MESSAGES)


def release_freed_memory() -> None:
    """Return memory to the system, and to other processes on the same card, after a task ran out of memory, or where a
    model was built whose numbers are elsewhere.

    The frames of the exception refer to each other, so they are collected. malloc keeps what is freed
    (`worker.keep_freed_memory`) in pieces that may have the wrong sizes for the next attempt, so it is trimmed.
    """
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    trim_heap()


def trim_heap() -> None:
    """Return the pages that malloc keeps and does not use to the system, where the C library can do it."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


class KeptMemory:
    """A bound of the freed memory that malloc keeps (`worker.keep_freed_memory`).

    An evaluation takes large pieces of memory and local steps small ones. A small piece that lives long divides a free
    large one, after which the next evaluation needs new memory. A run of 1,200 rounds and ten evaluations of a small
    language model kept 4 GB in this way, and used 0.4 GB of them.
    """

    def __init__(self, growth: int = 1 << 29) -> None:
        """growth: by how many bytes the memory of the process may grow after the first call of `trim`."""
        self.growth = growth
        self.limit: int | None = None

    def trim(self) -> None:
        """Return free pages to the system if the process has grown by more than it may. Most calls read one number."""
        if self.limit is None:
            self.limit = resident_memory() + self.growth
        elif resident_memory() > self.limit:
            trim_heap()
            self.limit = max(self.limit, resident_memory() + self.growth)  # of what is in use, nothing can be returned


def resident_memory() -> int:
    """The bytes of memory that this process has, without what it shares with others or maps from files; 0 where the
    system does not say."""
    with suppress(OSError):
        _, resident, shared = Path("/proc/self/statm").read_text().split()[:3]
        return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")
    return 0


def collect_seldom() -> None:
    """Python's collector of garbage leaves out all objects that exist now, and looks for garbage seldom.

    For a process whose libraries and data stay as long as the process itself: the collector would look through them
    again and again.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


@contextmanager
def bounded_address_space() -> Iterator[None]:
    """While it lasts, the address space of this process can grow only by the memory that is available.

    Linux grants more memory than it has and kills processes that use it. With the bound an allocation fails instead,
    and the failure can be reported. There is no bound if there are GPUs: their drivers reserve address space that they
    do not use.
    """
    free = None if torch.cuda.is_available() else available_memory()
    if free is None:
        yield
        return
    with LIMIT_LOCK:
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * os.sysconf("SC_PAGE_SIZE") + free
        resource.setrlimit(resource.RLIMIT_AS, (limit if soft == resource.RLIM_INFINITY else min(limit, soft), hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def available_memory(system: Path = Path("/proc/meminfo"), groups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """The bytes that this process can still allocate, or None if the system does not say.

    It is the available memory of the machine, or that of the process's control group if it is less.
    """
    try:
        (line,) = (line for line in system.read_text().splitlines() if line.startswith("MemAvailable:"))
        found = 1024 * int(line.split()[1])
    except (OSError, ValueError):
        return None
    for folder, limit, usage in (
        (groups, "memory.max", "memory.current"),
        (groups / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        with suppress(OSError, ValueError):
            used = int((folder / usage).read_text()) - cached_files(folder / "memory.stat")
            found = min(found, int((folder / limit).read_text()) - used)
    return max(found, 0)


def cached_files(statistics: Path) -> int:
    """The bytes of a control group's usage that are copies of files. The kernel gives them up when memory is needed.

    If they counted as used, a group that has read many files would look full although its processes need little.
    """
    found = {}
    with suppress(OSError, ValueError):
        for line in statistics.read_text().splitlines():
            name, _, value = line.partition(" ")
            found[name.removeprefix("total_")] = int(value)  # in version 1, total_… includes the groups below
    return found.get("active_file", 0) + found.get("inactive_file", 0)


Value = TypeVar("Value")


class Recent(Generic[Value]):
    """Values that are kept because they take long to make: those that were asked for last."""

    def __init__(self, most: float, size: Callable[[Value], float] = lambda value: 1) -> None:
        """most: the largest sum of the sizes of the values; the last value is kept in any case. size: of a value, for
        example in bytes; by default values are counted."""
        self.most, self.size, self.total = most, size, 0.0
        self.kept: OrderedDict[Hashable, Value] = OrderedDict()

    def of(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """The value of a key, made if it is not kept."""
        if key not in self.kept:
            self.kept[key] = make()
            self.total += self.size(self.kept[key])
        self.kept.move_to_end(key)
        while len(self.kept) > 1 and self.total > self.most:
            self.total -= self.size(self.kept.popitem(last=False)[1])
        return self.kept[key]

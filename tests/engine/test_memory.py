"""The memory of a worker without its block is less than 150 MiB above that of `import torch` alone, a finished run
frees its memory, and a process returns freed memory that it keeps in vain."""

from __future__ import annotations

import gc
import platform
import subprocess
import sys

import pytest
import torch

from fedfleet.engine import run
from fedfleet.engine.clients.worker import Worker
from fedfleet.engine.memory import KeptMemory, resident_memory

from ..faults.runs import Watch, processes
from .setups import STEPS, digits

LIMIT_MIB = 150
BARE = "import torch, psutil; print(psutil.Process().memory_info().rss)"


def test_a_worker_is_light(ray_here):
    bare = int(subprocess.run([sys.executable, "-c", BARE], check=True, capture_output=True, text=True).stdout)
    earlier, resident = processes("WorkerProcess"), []

    def look() -> None:
        (worker,) = (process for process in processes("WorkerProcess") if process not in earlier)
        resident.append(worker.memory_info().rss)

    run(digits("scaffold", STEPS, rounds=30, backend="ray", workers=1), observers=[Watch(r3=look)])
    assert resident[0] - bare < LIMIT_MIB * 2**20


def test_a_finished_run_lets_go_of_its_data():
    """This must not need the garbage collector, which runs late: the data of many runs in one process must not
    accumulate."""
    gc.collect()
    # Fixtures of other tests in this process may have workers: only those of this run are counted.
    earlier = workers_in_this_process()
    gc.disable()
    try:
        run(digits("scaffold", STEPS, rounds=1))
        assert not [worker for worker in workers_in_this_process() if worker not in earlier]
    finally:
        gc.enable()


def workers_in_this_process() -> list[Worker]:
    return [found for found in gc.get_objects() if type(found) is Worker]


GROWN = """
import torch
from fedfleet.engine.clients.worker import keep_freed_memory
from fedfleet.engine.memory import KeptMemory, resident_memory

keep_freed_memory()
kept = KeptMemory(growth=64 << 20)
kept.trim()
pieces = [torch.zeros(1 << 20) for _ in range(40)]  # 4 MiB each
del pieces[:-1]  # the last one is at the end of the heap, and holds the free ones before it
grown = resident_memory()
kept.trim()
print(kept.limit, grown, resident_memory())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's malloc keeps freed memory, and returns it")
def test_freed_memory_is_returned_where_a_process_has_grown_too_much():
    told = subprocess.run([sys.executable, "-c", GROWN], check=True, capture_output=True, text=True).stdout
    limit, grown, after = map(int, told.split())
    assert grown > limit > after
    assert grown - after > 39 * (4 << 20) - (16 << 20)


def test_memory_in_use_raises_the_limit():
    """Otherwise a run that needs more memory later than at first would be trimmed after every evaluation."""
    kept = KeptMemory(growth=4 << 20)
    kept.trim()
    first = kept.limit
    used = torch.zeros(8 << 20)  # 32 MiB
    kept.trim()
    assert first is not None
    assert kept.limit is not None
    assert kept.limit - first > 16 << 20 or not resident_memory()
    del used

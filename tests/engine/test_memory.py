"""The memory of a worker without its block is less than 150 MiB above that of `import torch` alone, a finished run
frees its memory, and a process returns freed memory that it keeps in vain."""

from __future__ import annotations

import gc
import platform
import subprocess
import sys
import threading

import psutil
import pytest
from torch import nn

from fedfleet.engine import Result, run
from fedfleet.engine.api import new_run
from fedfleet.engine.clients.worker import Worker
from fedfleet.engine.config.schema import experiment
from fedfleet.engine.rounds.driver import Driver
from fedfleet.engine.run_spec import RunSpec

from ..faults.runs import Watch, processes
from .setups import STEPS, digits, execute_together

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


@pytest.mark.parametrize("together", [False, True])
def test_a_finished_run_lets_go_of_its_data_and_states(together, tmp_path):
    """This must not need the garbage collector, which runs late: the data of many runs in one process must not
    accumulate, nor their models, arrays over all clients, threads and open files."""
    plain = digits("scaffold", STEPS, rounds=1).plain()
    made = experiment(plain | {"checkpoint": {"every": 1, "last": True, "folder": str(tmp_path / "copies")}})
    runs = [new_run(made, tmp_path / str(number), None) for number in range(2)] if together else []
    gc.collect()
    # Fixtures of other tests in this process may have some, too: only those of these runs are counted.
    earlier = large_objects(), threading.active_count(), open_files()
    gc.disable()
    try:
        if together:
            assert all(isinstance(ended, Result) for ended in execute_together(runs))
            runs.clear()
        else:
            run(made, tmp_path / "alone")
        assert not large_objects() - earlier[0]
        assert (threading.active_count(), open_files()) == earlier[1:]
    finally:
        gc.enable()


def large_objects() -> set[int]:
    """The ids of what has data, models or arrays over all clients of a run in this process."""
    return {id(found) for found in gc.get_objects() if type(found) in (Worker, Driver, RunSpec, nn.Linear)}


def open_files() -> int:
    return psutil.Process().num_fds()


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


IN_USE = """
import torch
from fedfleet.engine.memory import KeptMemory

kept = KeptMemory(growth=4 << 20)
kept.trim()
first = kept.limit
used = torch.ones(8 << 20)  # 32 MiB
kept.trim()
print(first, kept.limit)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says how much memory a process has in /proc")
def test_memory_in_use_raises_the_limit():
    """Otherwise a run that needs more memory later than at first would be trimmed after every evaluation."""
    told = subprocess.run([sys.executable, "-c", IN_USE], check=True, capture_output=True, text=True).stdout
    first, limit = map(int, told.split())
    assert limit - first > 16 << 20

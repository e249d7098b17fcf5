"""The memory of a worker without its block is less than 150 MiB above that of `import torch` alone, and a finished run
frees its memory."""

from __future__ import annotations

import gc
import subprocess
import sys

from fedfleet.engine import run
from fedfleet.engine.clients.worker import Worker

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

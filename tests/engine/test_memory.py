"""The memory of a worker without its block is less than 150 MiB above that of `import torch` alone, and a finished run
frees its memory."""

from __future__ import annotations

import gc
import subprocess
import sys

import psutil

from fedfleet.engine.api import run
from fedfleet.engine.clients.worker import Worker
from fedfleet.engine.runs.launch import prepare

from .setups import STEPS, digits, driver_on_ray

LIMIT_MIB = 150
BARE = "import torch, psutil; print(psutil.Process().memory_info().rss)"


def test_a_worker_is_light(ray_here):
    bare = int(subprocess.run([sys.executable, "-c", BARE], check=True, capture_output=True, text=True).stdout)
    run_spec = prepare(digits("scaffold", STEPS, rounds=3, backend="ray", workers=1), "test")
    with driver_on_ray(run_spec) as driver:
        assert len(list(driver.rounds())) == 3
        worker = driver.pool.workers[0].started  # pyright: ignore[reportAttributeAccessIssue]
        above = (psutil.Process(worker.process).memory_info().rss - bare) / 2**20
    assert above < LIMIT_MIB


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

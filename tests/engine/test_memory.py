"""The memory of a worker without its block is less than 150 MiB above that of `import torch` alone, and a finished run
frees its memory."""

from __future__ import annotations

import gc
import subprocess
import sys

import psutil

from fedfleet.engine.api import run
from fedfleet.engine.clients.worker import Worker
from fedfleet.engine.rounds.driver import DataSummary, Driver
from fedfleet.engine.runs.launch import prepare

from .setups import STEPS, digits

LIMIT_MIB = 150
BARE = "import torch, psutil; print(psutil.Process().memory_info().rss)"


def test_a_worker_is_light(ray_here):
    import ray

    from fedfleet.engine.backends.ray.connect import here
    from fedfleet.engine.backends.ray.driver_actor import examples
    from fedfleet.engine.backends.ray.worker_pool import Hooks, WorkerPool, WorkerRequest
    from fedfleet.engine.records.arrow_columns import to_arrow

    bare = int(subprocess.run([sys.executable, "-c", BARE], check=True, capture_output=True, text=True).stdout)
    run_spec = prepare(digits("scaffold", STEPS, rounds=3, backend="ray", workers=1), "test")
    split = run_spec.split()
    data = [ray.put(part) for part in (to_arrow(split.train), to_arrow(split.test), split.client_index)]
    driver = Driver(run_spec, DataSummary(split.client_index, examples(split.test)))
    try:
        groups = run_spec.experiment.engine.groups()
        requests = [WorkerRequest(group, here()) for group in groups for _ in range(group.count)]
        hooks = Hooks(lambda: None, driver.log)
        driver.start(lambda table: WorkerPool(run_spec, data, table.layout, hooks, requests))
        assert len(list(driver.rounds())) == 3
        pid = ray.get(driver.pool.workers[0].pid)
        above = (psutil.Process(pid).memory_info().rss - bare) / 2**20
    finally:
        driver.close()
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

"""A round's time among 100,000 clients to that among 1,000, the cohort alike: two runs in turn, a round each.

    python benchmarks/populations.py                    states on the disk
    python benchmarks/populations.py --store /dev/shm   in memory
    python benchmarks/populations.py --held             their files are there before, and locked in memory

The last is for virtual machines whose memory is taken back while it is not in use: there a state's first writing, and
any use of it after a while, waits for the host of the machine.

SCAFFOLD, 9,985 parameters, on Ray with two workers each, of which two at a time are idle. What disturbs the machine
disturbs both rounds of a pair. In windows of rounds, the first while nearly all of the many are on their first visit.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path

import ray
from scale import config, spread

from fedfleet.engine.backends.ray.connect import here, start_ray
from fedfleet.engine.backends.ray.driver_actor import examples
from fedfleet.engine.backends.ray.worker_pool import Hooks, WorkerPool, WorkerRequest
from fedfleet.engine.config.run_spec import RunSpec
from fedfleet.engine.config.schema import experiment
from fedfleet.engine.records.arrow_columns import to_arrow
from fedfleet.engine.rounds.driver import DataSummary, Driver
from fedfleet.engine.runs.launch import new_run_id
from fedfleet.engine.state.retention import state_folder
from fedfleet.engine.state.row_files import FILES, paths

MIB = 2**20
WARMUP = 10
ROWS = {"many_mlp": 4 * 9_985, "many_lenet": 4 * 61_706}
"""Bytes of a client's state, by the work."""


def job_of(clients: int, asked: argparse.Namespace) -> RunSpec:
    plan = config(asked.work, {"clients": clients, "cohort": asked.cohort, "rounds": asked.rounds})
    plan["engine"] |= {"store": asked.store, "block": 1, "kernels": "chain"}
    return RunSpec.of(new_run_id(), experiment(plan))


def play(run_spec: RunSpec) -> Iterator[dict[str, float]]:
    """The records of a run whose driver is this process."""
    split = run_spec.split()
    data = [ray.put(part) for part in (to_arrow(split.train), to_arrow(split.test), split.client_index)]
    driver = Driver(run_spec, DataSummary(split.client_index, examples(split.test)))
    groups = run_spec.experiment.engine.groups()
    requests = [WorkerRequest(group, here()) for group in groups for _ in range(group.count)]
    hooks = Hooks(lambda: None, driver.tell)
    driver.start(lambda table: WorkerPool(run_spec, data, table.place, hooks, requests))
    try:
        for told in driver.rounds():
            if isinstance(told, dict):
                yield told
    finally:
        driver.close()


def hold_states(folder: Path, size: int) -> list[mmap.mmap]:
    """Files of rows of `size` bytes together, written and locked in memory as long as what is returned is kept."""
    folder.mkdir(parents=True)
    held, libc = [], ctypes.CDLL(None, use_errno=True)
    for path in paths(str(folder)):
        with open(path, "w+b") as file:
            for begin in range(0, size // FILES, MIB):
                file.write(bytes(min(MIB, size // FILES - begin)))
            file.flush()
            os.fsync(file.fileno())
            held.append(mmap.mmap(file.fileno(), 0))
        place = ctypes.addressof(ctypes.c_char.from_buffer(held[-1]))
        if libc.mlock(ctypes.c_void_p(place), ctypes.c_size_t(len(held[-1]))):
            raise OSError(ctypes.get_errno(), "memory cannot be locked, see `ulimit -l`")
    return held


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sizes", type=int, nargs=2, default=[1_000, 100_000])
    parser.add_argument("--work", choices=list(ROWS), default="many_mlp")
    parser.add_argument("--cohort", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=610)
    parser.add_argument("--window", type=int, default=100)
    parser.add_argument("--store", default=tempfile.gettempdir())
    parser.add_argument("--held", action="store_true")
    asked = parser.parse_args()
    jobs = [job_of(size, asked) for size in asked.sizes]
    held = []
    for run_spec, size in zip(jobs, asked.sizes, strict=True):
        held += hold_states(state_folder(run_spec), ROWS[asked.work] * (size + 2 * asked.cohort)) if asked.held else []
    ray.init("local", num_cpus=2 * len(jobs), include_dashboard=False, log_to_driver=False)
    start_ray(jobs[0])
    pairs, shares = [], []
    for few, many in zip(*map(play, jobs), strict=True):
        pairs.append((few["time/seconds"], many["time/seconds"]))
        shares.append([100 * row["time/state"] / row["time/workers"] for row in (few, many)])
        if len(pairs) > WARMUP and (len(pairs) - WARMUP) % asked.window == 0:
            last = pairs[-asked.window :]
            ratios = statistics.quantiles([many / few for few, many in last], n=4)
            seconds = [spread([pair[i] for pair in last], 3) for i in (0, 1)]
            parts = [statistics.median(each) for each in zip(*shares[-asked.window :], strict=True)]
            print(
                f"rounds {len(pairs) - asked.window + 1} to {len(pairs)}: {seconds[0]} s, {seconds[1]} s; "
                f"ratio {ratios[1]:.3f}, quartiles {ratios[0]:.3f} and {ratios[2]:.3f}; "
                f"states {parts[0]:.1f} % and {parts[1]:.1f} %",
                flush=True,
            )
    ray.shutdown()


if __name__ == "__main__":
    main()

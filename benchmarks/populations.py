"""Measures the time per round with 100,000 clients relative to that with 1,000 clients, with cohorts of equal size.

    python benchmarks/populations.py                    states on the disk
    python benchmarks/populations.py --million          1,000,000 clients relative to 10,000: two models, two methods
    python benchmarks/populations.py --store /dev/shm   states in memory
    python benchmarks/populations.py --held             files of states written before the runs and locked in memory

The last form is for virtual machines whose memory the hypervisor takes back while it is not in use: there the first
write to a state, and any use of it after a while, waits for the hypervisor.

Two runs of SCAFFOLD with 9,985 parameters go on in turn, one round each, on Ray with two workers each; the workers of
the other run are idle meanwhile. So other work on the machine affects both rounds of a pair. The script prints a line
for each window of rounds; in the first window nearly all of the 100,000 clients take part for the first time.

With --million there are cohorts of 100, and the figure is that of all rounds after the warm-up, for each of logistic
regression (650 parameters) and an MLP (9,985), by FedAvg and by SCAFFOLD.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import statistics
import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import ray
from scale import config, spread

from fedfleet.engine.backends.ray.arrow_columns import to_arrow
from fedfleet.engine.backends.ray.connect import connect, here
from fedfleet.engine.backends.ray.driver_actor import examples
from fedfleet.engine.backends.ray.ray_pool import Hooks, RayPool
from fedfleet.engine.backends.ray.worker_handle import WorkerRequest
from fedfleet.engine.cohorts.tasks import steps_of
from fedfleet.engine.config.schema import experiment
from fedfleet.engine.rounds.driver import Driver
from fedfleet.engine.run_spec import RunSpec
from fedfleet.engine.runs.prepare import new_run_id
from fedfleet.engine.state.row_files import FILES, paths

MIB = 2**20
WARMUP = 10
ROWS = {"many_mlp": 4 * 9_985, "many_lenet": 4 * 61_706, "many_logistic": 4 * 650}
"""Work -> bytes of a client's state."""


def run_spec_of(clients: int, asked: argparse.Namespace) -> RunSpec:
    """The run with so many clients."""
    plan = config(asked.work, {"clients": clients, "cohort": asked.cohort, "rounds": asked.rounds})
    plan["method"]["name"] = asked.method
    plan["engine"] |= {"store": asked.store, "block": 1, "kernels": "chain"}
    return RunSpec.of(new_run_id(), experiment(plan))


def play(run_spec: RunSpec) -> Iterator[dict[str, float]]:
    """The records of the rounds of a run, whose driver is in this process."""
    split = run_spec.split()
    data = [ray.put(part) for part in (to_arrow(split.train), to_arrow(split.test), split.client_index)]
    driver = Driver(run_spec, split.client_index, examples(split.test))
    groups = run_spec.experiment.engine.groups()
    mine = ray.get_runtime_context().get_node_id()
    requests = [WorkerRequest(group, here(), mine) for group in groups for _ in range(group.count)]
    hooks = Hooks(lambda: None, driver.log)
    steps = steps_of(split.client_index.sizes, run_spec.experiment.federation.local)
    driver.start(lambda table: RayPool(run_spec, data, table, hooks, steps, requests))
    try:
        for event in driver.rounds():
            if isinstance(event, dict):
                yield event
    finally:
        driver.close()


def hold_states(folder: Path, size: int) -> list[mmap.mmap]:
    """Write the files of rows, `size` bytes together, and lock them in memory. They stay locked as long as the result
    is kept."""
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
            raise OSError(ctypes.get_errno(), "memory cannot be locked; raise the limit `ulimit -l`")
    return held


def compare(asked: argparse.Namespace) -> None:
    """Run the two populations in turn, and print a line for each window of rounds."""
    run_specs = [run_spec_of(size, asked) for size in asked.sizes]
    held = []
    for run_spec, size in zip(run_specs, asked.sizes, strict=True):
        held += hold_states(run_spec.state_folder, ROWS[asked.work] * (size + 2 * asked.cohort)) if asked.held else []
    connect(run_specs[0].experiment.engine)
    pairs, shares = [], []
    for few, many in zip(*map(play, run_specs), strict=True):
        pairs.append((few["time/seconds"], many["time/seconds"]))
        shares.append([100 * row["time/state"] / row["time/workers"] for row in (few, many)])
        if len(pairs) > WARMUP and (len(pairs) - WARMUP) % asked.window == 0:
            last = pairs[-asked.window :]
            ratios = statistics.quantiles([many / few for few, many in last], n=4)
            seconds = [spread([pair[i] for pair in last], 3) for i in (0, 1)]
            parts = [statistics.median(each) for each in zip(*shares[-asked.window :], strict=True)]
            print(
                f"{asked.method}, {asked.work}, rounds {len(pairs) - asked.window + 1} to {len(pairs)}: "
                f"{seconds[0]} s, {seconds[1]} s; ratio {ratios[1]:.3f}, "
                f"quartiles {ratios[0]:.3f} and {ratios[2]:.3f}; states {parts[0]:.1f} % and {parts[1]:.1f} %",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sizes", type=int, nargs=2, default=[1_000, 100_000])
    parser.add_argument("--work", choices=list(ROWS), default="many_mlp")
    parser.add_argument("--method", choices=["fedavg", "scaffold"], default="scaffold")
    parser.add_argument("--cohort", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=610)
    parser.add_argument("--window", type=int, default=100)
    parser.add_argument("--store", default=tempfile.gettempdir())
    parser.add_argument("--held", action="store_true")
    parser.add_argument("--million", action="store_true")
    asked = parser.parse_args()
    ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    if asked.million:
        asked.sizes, asked.cohort, asked.rounds, asked.window = [10_000, 1_000_000], 100, WARMUP + 100, 100
        for asked.work, asked.method in product(("many_logistic", "many_mlp"), ("fedavg", "scaffold")):
            compare(asked)
    else:
        compare(asked)
    ray.shutdown()


if __name__ == "__main__":
    main()

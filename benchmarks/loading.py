"""Measures the time and memory to load a data set and to divide it among clients: from its files with an empty cache,
and again from the cache, each in a new process.

    FEDFLEET_DATA=… python benchmarks/loading.py [--set cifar10] [--clients 10000]

The time begins when everything is imported. It is given in seconds of the clock and of the processor; the latter depend
less on other work on the machine. Memory is the peak resident memory of the process, and its value before loading
began.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from typing import Any

PARTITIONS = ("iid", "dirichlet", "dirichlet_prior", "shards")


def peak() -> float:
    """The peak resident memory of this process in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(name: str, partition: str, clients: int) -> dict[str, Any]:
    """Load and partition a data set, as a run does before its first round."""
    from fedfleet.engine.config.schema import experiment
    from fedfleet.engine.run_spec import RunSpec

    run_spec = RunSpec.of(
        "loading",
        experiment(
            {
                "workload": {"name": name, "partition": partition},
                "method": {"name": "fedavg", "rule": {"name": "sgd", "lr": 0.1}},
                "federation": {"clients": clients, "cohort": 1},
            }
        ),
    )
    run_spec.workload.check()
    before, began, processor = peak(), time.perf_counter(), time.process_time()
    split = run_spec.split()
    return {
        "partition": partition,
        "seconds": round(time.perf_counter() - began, 2),
        "processor": round(time.process_time() - processor, 2),
        "mib": round(peak()),
        "mib_before": round(before),
        "rows": len(split.client_index.rows),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--set", default="cifar10")
    parser.add_argument("--clients", type=int, default=10_000)
    parser.add_argument("--child", help="measure this partition here and print one JSON line")
    asked = parser.parse_args()
    if asked.child:
        print(json.dumps(measure(asked.set, asked.child, asked.clients)))
        return
    with tempfile.TemporaryDirectory() as cache:
        for number, partition in enumerate((PARTITIONS[0], *PARTITIONS)):
            command = [sys.executable, __file__, "--set", asked.set, "--clients", str(asked.clients)]
            load = os.getloadavg()[0]
            done = subprocess.run(
                [*command, "--child", partition],
                env={**os.environ, "FEDFLEET_CACHE": cache},
                capture_output=True,
                text=True,
                check=True,
            )
            print("from the files" if number == 0 else "again", f"load {load:.1f}", done.stdout.strip(), flush=True)


if __name__ == "__main__":
    main()

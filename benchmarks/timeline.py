"""Measures how driver and workers spend the time of a round, and when they wait for each other.

    python benchmarks/timeline.py w2 fedavg --rounds 120

The run has two workers on Ray, and its driver is this process. Functions of the engine are timed from outside, in the
workers by inside.py. The script prints the time of each function per round, and one round of the driver from its
beginning to its end.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import ray

from fedfleet.engine.backends.ray import worker_pool
from fedfleet.engine.cohorts import sampling
from fedfleet.engine.reduction import round_totals
from fedfleet.engine.rounds import driver

WARMUP = 10
marks: list[tuple[float, str]] = []

WATCHED = (
    *((driver.Driver, name) for name in ("run_round", "_train", "_commit")),
    *((sampling, name) for name in ("sample",)),
    *((worker_pool.WorkerPool, name) for name in ("begin", "_issue", "_collect")),
    *((worker_pool.pickle, "dumps"), (worker_pool, "wait_for"), (round_totals, "add_leaves")),
)


def timed(where: Any, name: str) -> None:
    """Replace a function by one that notes when it begins and ends."""
    function: Callable[..., Any] = getattr(where, name)

    def noted(*args: Any, **more: Any) -> Any:
        marks.append((time.monotonic(), f"+{name}"))
        try:
            return function(*args, **more)
        finally:
            marks.append((time.monotonic(), f"-{name}"))

    setattr(where, name, noted)


def show() -> None:
    """Print the times of the driver's functions."""
    rounds = [moment for moment, what in marks if what == "+run_round"][WARMUP:]
    spent, calls, begun = defaultdict(float), Counter[str](), {}
    for moment, what in marks:
        if rounds[0] <= moment < rounds[-1]:
            if what[0] == "+":
                begun[what[1:]] = moment
            else:
                spent[what[1:]] += moment - begun[what[1:]]
                calls[what[1:]] += 1
    count = len(rounds) - 1
    length = statistics.median(1e3 * (end - begin) for begin, end in pairwise(rounds))
    print(f"a round takes {length:.1f} ms, median of {count}; means of calls, which may contain each other:")
    for name in sorted(spent, key=lambda name: -spent[name]):
        whole, number = 1e3 * spent[name] / count, calls[name] / count
        print(f"  {name:12s} {whole:7.2f} ms per round, {number:5.1f} of {whole / number:.3f}")
    begin, end = rounds[count // 2], rounds[count // 2 + 1]
    print("one round, ms:")
    for moment, what in marks:
        if begin <= moment < end and what[1:] != "add_leaves":
            print(f"  {1e3 * (moment - begin):7.2f} {what}")


def show_workers(folder: Path) -> None:
    """Print the times of the workers' functions, which inside.py wrote into the folder."""
    print("the workers, ms per round; calls may contain each other, and in Listener.wait a worker is idle:")
    for number, path in enumerate(sorted(folder.iterdir())):
        seen = json.loads(path.read_text())
        print(f"  worker {number}, {seen['rounds']} rounds")
        for name, (seconds, calls) in sorted(seen["spent"].items(), key=lambda item: -item[1][0]):
            whole, each = 1e3 * seconds / seen["rounds"], 1e3 * seconds / max(calls, 1)
            print(f"    {name:24s} {whole:7.2f}, {calls / seen['rounds']:5.1f} of {each:.3f}")


def shares(rows: list[dict[str, float]]) -> None:
    """Print the shares of a round's time, over both workers."""
    for part in ("compute", "data", "state", "reduce", "wait"):
        found = statistics.median(row[f"time/{part}"] / (2 * row["time/seconds"]) for row in rows)
        print(f"  {part:8s} {100 * found:5.1f} %")


def main() -> None:
    from populations import play

    from fedfleet.engine.backends.ray.connect import start_ray
    from fedfleet.engine.config.schema import experiment
    from fedfleet.engine.run_spec import RunSpec
    from fedfleet.engine.runs.launch import new_run_id
    from fedfleet.tune.bench.measure import METHODS
    from fedfleet.tune.bench.works import FEDERATIONS

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("work", choices=list(FEDERATIONS))
    parser.add_argument("method", choices=list(METHODS), nargs="?", default="fedavg")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--kernels", default="chain")
    asked = parser.parse_args()
    made = experiment(
        {
            "plugins": ["fedfleet.tune.bench.works", str(Path(__file__).with_name("inside.py"))],
            "workload": asked.work,
            "method": METHODS[asked.method],
            "federation": {**FEDERATIONS[asked.work], "rounds": asked.rounds},
            "engine": {"workers": 2, "block": 1, "kernels": asked.kernels},
            "evaluate": {"every": 0},
            "tracking": {"uri": "none"},
        }
    )
    run_spec = RunSpec.of(new_run_id(), made)
    for where, name in WATCHED:
        timed(where, name)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["FEDFLEET_INSIDE"] = folder
        start_ray(run_spec)
        rows = list(play(run_spec))
        show()
        show_workers(Path(folder))
    print("shares of a round:")
    shares(rows[WARMUP:-1])
    ray.shutdown()


if __name__ == "__main__":
    main()

"""Measures the client updates per second of asynchronous runs relative to those of synchronous rounds.

    python benchmarks/asynchronous.py                     w1, 100 clients in flight, updates of 10 results
    python benchmarks/asynchronous.py --buffer 50         updates of 50 results
    python benchmarks/asynchronous.py --workers 1         one worker, so that the driver has a processor of its own

Both are w1 (LeNet, see `fedfleet bench`) with the same plan, on Ray. Runs go in turn; the script prints a line for each
pair. The first rounds of each run are not counted. Where the workers take all processors, the driver takes its time
from them, so the ratio of processor times bounds that of the speeds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from contextlib import suppress
from typing import Any, NamedTuple

import psutil

from fedfleet.engine.api import rounds
from fedfleet.engine.config.schema import experiment
from fedfleet.tune.bench.works import FEDERATIONS

WARMUP = 0.2
"""The share of a run's rounds that is not counted."""


def config(asked: argparse.Namespace, pace: dict[str, Any] | None) -> dict[str, Any]:
    """The experiment: `asked.visits` client updates, in rounds of 100 or in updates of `asked.buffer`."""
    each = 100 if pace is None else asked.buffer
    federation = {**FEDERATIONS["w1"], "rounds": asked.visits // each}
    if pace is not None:
        federation["pace"] = pace
    return {
        "plugins": ["fedfleet.tune.bench.works"],
        "workload": "w1",
        "method": {"name": "fedavg", "rule": {"name": "sgd", "lr": 0.01}},
        "federation": federation,
        "systems": None if pace is None else {"devices": {"name": "lognormal", "sigma": 1.0}},
        "engine": {"workers": asked.workers, "kernels": "chain", "block": 1},
        "evaluate": {"every": 0},
        "tracking": {"uri": "none"},
    }


class Speed(NamedTuple):
    """Client updates per second, and the milliseconds of processor time of all processes for each of them."""

    updates: float
    processor: float


def processor_seconds() -> float:
    """The processor time so far of this process and of all its descendants."""
    found = 0.0
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        with suppress(psutil.Error):
            times = process.cpu_times()
            found += times.user + times.system
    return found


def speed(made: dict[str, Any]) -> Speed:
    """The speed after the warm-up."""
    federation = made["federation"]
    each = 100 if "pace" not in federation else federation["pace"]["buffer"]
    skipped, last = max(1, int(WARMUP * federation["rounds"])), federation["rounds"] - 1  # the last round evaluates
    began = ended = used = 0.0
    for record in rounds(experiment(made)):
        if record["round"] == skipped:
            began, used = time.perf_counter(), -processor_seconds()
        elif record["round"] == last:
            ended = time.perf_counter()
            used += processor_seconds()
            break
    counted = each * (last - skipped)
    return Speed(counted / (ended - began), 1e3 * used / counted)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--buffer", type=int, default=10)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--visits", type=int, default=10_000)
    parser.add_argument("--pairs", type=int, default=3)
    asked = parser.parse_args()
    pace = {"name": "buffered", "buffer": asked.buffer}
    ratios, processor = [], []
    for _ in range(asked.pairs):
        synchronous, asynchronous = speed(config(asked, None)), speed(config(asked, pace))
        ratios.append(asynchronous.updates / synchronous.updates)
        processor.append(synchronous.processor / asynchronous.processor)
        print(
            f"synchronous {synchronous.updates:.0f}, asynchronous {asynchronous.updates:.0f} client updates a second; "
            f"ratio {ratios[-1]:.2f}; {synchronous.processor:.2f} and {asynchronous.processor:.2f} ms of processor "
            f"time for each; ratio {processor[-1]:.2f}",
            flush=True,
        )
    print(f"median ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    print(f"of processor time {statistics.median(processor):.2f} ({min(processor):.2f} to {max(processor):.2f})")


if __name__ == "__main__":
    main()

"""Measures the client updates per second of asynchronous runs relative to those of synchronous rounds.

    python benchmarks/asynchronous.py                     w1, 100 clients in flight, updates of 10 results
    python benchmarks/asynchronous.py --buffer 50         updates of 50 results

Both are w1 (LeNet, see `fedfleet bench`) with the same plan, on Ray with two workers. Runs go in turn; the script
prints a line for each pair. The first rounds of each run are not counted.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

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
        "engine": {"workers": 2, "kernels": "chain", "block": 1},
        "evaluate": {"every": 0},
        "tracking": {"uri": "none"},
    }


def speed(made: dict[str, Any]) -> float:
    """Client updates per second after the warm-up."""
    each = 100 if "pace" not in made["federation"] else made["federation"]["pace"]["buffer"]
    skipped, counted = int(WARMUP * made["federation"]["rounds"]), 0
    began = ended = 0.0
    for record in rounds(experiment(made)):
        if record["round"] == made["federation"]["rounds"]:
            break  # it evaluates
        ended = time.perf_counter()
        if record["round"] <= skipped:
            began = ended
        else:
            counted += each
    return counted / (ended - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--buffer", type=int, default=10)
    parser.add_argument("--visits", type=int, default=10_000)
    parser.add_argument("--pairs", type=int, default=3)
    asked = parser.parse_args()
    pace = {"name": "buffered", "buffer": asked.buffer}
    ratios = []
    for _ in range(asked.pairs):
        synchronous, asynchronous = speed(config(asked, None)), speed(config(asked, pace))
        ratios.append(asynchronous / synchronous)
        print(
            f"synchronous {synchronous:.0f}, asynchronous {asynchronous:.0f} client updates per second; "
            f"ratio {ratios[-1]:.2f}",
            flush=True,
        )
    print(f"median ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    main()

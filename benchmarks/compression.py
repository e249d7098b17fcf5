"""Measures the processor time of a round of compressed methods relative to FedAvg.

    python benchmarks/compression.py --repeats 3

The model is the CNN4 of FedMUD, the data are synthetic images in the shapes of FashionMNIST, and the runs are in this
process on one thread, with ten clients per round and 5 steps of 64. A round's time is without evaluation, the median
over rounds after a warm-up. The methods run in turn, and each ratio is to the FedAvg run of the same repeat.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from fedfleet.engine import run
from fedfleet.engine.config.schema import experiment
from fedfleet.engine.runs.observer import Observer

METHODS = ("fedmud", "fedmud_bkd", "fedmud_aad", "fedmud_bkd_aad", "fedhm", "fedlmt", "fedpara", "ef21_p", "fedbat")
WARMUP = 2


class Clock(Observer):
    """Records the processor seconds of each round; workers run in this process, so they are included."""

    def __init__(self) -> None:
        self.at, self.rounds = time.process_time(), list[float]()

    def record(self, record: dict[str, float]) -> None:
        now = time.process_time()
        self.rounds.append(now - self.at)
        self.at = now

    def begin(self, run_spec: Any) -> None:
        self.at = time.process_time()


def seconds(method: str, rounds: int) -> float:
    """Processor seconds per round, the median over `rounds` rounds."""
    clock = Clock()
    chosen = {
        "plugins": [str(Path(__file__).with_name("works.py"))],
        "workload": "cnn4",
        "method": {"name": method, "rule": {"name": "sgd", "lr": 0.01}},
        "federation": {"clients": 100, "cohort": 10, "rounds": rounds + WARMUP + 1, "local": {"steps": 5, "batch": 64}},
        "engine": {"backend": "local", "block": 1},
        "evaluate": {"every": 0},
        "tracking": {"uri": "none"},
    }
    run(experiment(chosen), observers=[clock])
    return statistics.median(clock.rounds[WARMUP:-1])  # the last round evaluates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("methods", nargs="*", default=METHODS)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=4, help="rounds that are measured")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    ratios: dict[str, list[float]] = {method: [] for method in asked.methods}
    for _ in range(asked.repeats):
        plain = seconds("fedavg", asked.rounds)
        print(f"fedavg {plain:.2f} s per round", flush=True)
        for method, found in ratios.items():
            found.append(seconds(method, asked.rounds) / plain)
    for method, found in ratios.items():
        print(f"{method:15} {statistics.median(found):.2f} ({min(found):.2f} … {max(found):.2f}) x FedAvg")


if __name__ == "__main__":
    main()

"""What grows in a long run: objects, or memory that malloc keeps?

    python benchmarks/heap.py --rounds 600

A run of SCAFFOLD on digits in this process. The script prints the process's own memory (RssAnon) and the number of
Python objects along the way. At the end malloc is asked to return what it keeps: workers make malloc keep freed memory
(`keep_freed_memory` in engine/clients/worker.py), so that the heap grows by fragments for some hundred rounds although
nothing is held.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os

from watch import status

from fedfleet.engine import run
from fedfleet.engine.config.schema import experiment
from fedfleet.engine.runs.observer import Observer


class Heap(Observer):
    """Prints the memory at some rounds, and after `malloc_trim` at the last one."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds
        self.looks = {5, rounds // 12, rounds // 6, rounds // 3, 2 * rounds // 3, rounds}

    def record(self, record: dict[str, float]) -> None:
        if int(record["round"]) not in self.looks:
            return
        gc.collect()
        objects, own = len(gc.get_objects()), status(os.getpid())["RssAnon"]
        print(f"round {record['round']:.0f}: {own:.1f} MiB, {objects:,} objects")
        if record["round"] == self.rounds:
            ctypes.CDLL(None).malloc_trim(0)
            print(f"after malloc_trim: {status(os.getpid())['RssAnon']:.1f} MiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=600)
    rounds = parser.parse_args().rounds
    config = {
        "workload": {"name": "digits", "model": {"name": "mlp", "hidden": [512]}},
        "method": {"name": "scaffold", "rule": {"name": "sgd", "lr": 0.05}},
        "federation": {"clients": 200, "cohort": 20, "rounds": rounds, "local": {"steps": 1, "batch": 4}},
        "engine": {"backend": "local", "kernels": "torch", "block": 1},
        "evaluate": {"every": 0},
        "tracking": {"uri": "none"},
    }
    run(experiment(config), observers=[Heap(rounds)])


if __name__ == "__main__":
    main()

"""How much memory does a frozen base take, on two workers of a node?

    python benchmarks/frozen_memory.py --hidden 7000

A run of FedAvg with 100 clients on Ray, whose network has two hidden layers of this width, frozen beside an adapter.
The script adds up the proportional set sizes of all processes of the run: memory that several processes share counts
once. It does so for a network without a base to speak of, too, and prints the difference beside the size of the base.
Linux only.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from fedfleet.engine import run
from fedfleet.engine.config.schema import experiment
from fedfleet.engine.runs.observer import Observer


def processes(root: int) -> Iterator[int]:
    """A process and all that it has started."""
    yield root
    for task in Path(f"/proc/{root}/task").glob("*/children"):
        for child in task.read_text().split():
            yield from processes(int(child))


class Shared(Observer):
    """Adds up the memory of all processes of this run after round 1."""

    total = 0.0

    def record(self, record: dict[str, float]) -> None:
        if record["round"] == 1:
            texts = [Path(f"/proc/{process}/smaps_rollup").read_text() for process in processes(os.getpid())]
            found = [re.search(r"^Pss:\s+(\d+) kB", text, re.MULTILINE) for text in texts]
            self.total = sum(int(match[1]) for match in found if match) / 1024


def memory(hidden: int) -> float:
    """The memory of a run with hidden layers of this width, in MiB."""
    made = experiment(
        {
            "workload": {
                "name": "digits",
                "model": {"name": "mlp", "hidden": [hidden, hidden]},
                "adapter": {"name": "lora", "targets": "fc2", "rank": 1},
            },
            "method": {"name": "fedavg", "rule": {"name": "adamw", "lr": 0.01}, "carry": "keep"},
            "federation": {"clients": 100, "cohort": 8, "rounds": 2, "local": {"steps": 2, "batch": 4}},
            "engine": {"backend": "ray", "workers": 2, "cpus": 0.5, "block": 1, "kernels": "torch"},
            "evaluate": {"every": 0, "batch": 50},
            "tracking": {"uri": "none"},
        }
    )
    shared = Shared()
    with tempfile.TemporaryDirectory() as folder:
        run(made, Path(folder) / "run", [shared])
    return shared.total


def apart(hidden: int) -> float:
    """`memory`, of a run in a process of its own."""
    command = [sys.executable, __file__, "--hidden", str(hidden), "--alone"]
    return float(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--hidden", type=int, default=7000)
    parser.add_argument("--alone", action="store_true", help="print the memory of this run alone")
    given = parser.parse_args()
    hidden = given.hidden
    if given.alone:
        print(memory(hidden))
        return
    base = 4 * (64 * hidden + hidden * hidden + 10 * hidden + 2 * hidden + 10) / 2**20
    more = apart(hidden) - apart(8)
    print(f"a base of {base:.0f} MiB takes {more:.0f} MiB, {more / base:.2f} times its size")


if __name__ == "__main__":
    main()

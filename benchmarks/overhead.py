"""The engine against the plain two-process loop, alternated: what does the engine cost, what does vectorising bring?

    python benchmarks/overhead.py --work w1 --repeats 3 --blocks 1 10

Prints a line a run and the medians of the ratios, each to the plain loop's run beside it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from fedfleet.engine import Experiment, run

HERE = Path(__file__).parent


def plain(work: str, rounds: int) -> float:
    """Median clients per second of the plain loop."""
    command = [sys.executable, str(HERE / "plain_loop.py"), "--work", work, "--rounds", str(rounds)]
    told = subprocess.run(command, check=True, capture_output=True, text=True)
    return statistics.median(json.loads(told.stdout.splitlines()[-1])["clients_per_s"])


def ours(work: str, rounds: int, block: int, method: dict[str, Any], hosts: int) -> float:
    """Median clients per second of a run on Ray, after two rounds of warm-up."""
    sys.path.insert(0, str(HERE))
    from works import FEDERATIONS

    experiment = Experiment.model_validate(
        {
            "plugins": [str(HERE / "works.py")],
            "workload": work,
            "method": method,
            "federation": {**FEDERATIONS[work], "rounds": rounds + 2},
            "engine": {"hosts": hosts, "block": block},
            "evaluate": {"every": 0},
            "tracking": {"uri": "none"},
        }
    )
    rows = run(experiment).rows[2:-1]  # the last round evaluates
    return statistics.median(row["client/count"] / row["time/seconds"] for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--work", default="w1", choices=["w1", "w2", "w3"])
    parser.add_argument("--method", default="fedavg")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--blocks", type=int, nargs="+", default=[1, 10])
    asked = parser.parse_args()
    method = {"name": asked.method}
    if asked.method in ("fedavg", "scaffold"):
        method["rule"] = {"name": "sgd", "lr": 0.05}
    ratios: dict[int, list[float]] = {block: [] for block in asked.blocks}
    for _ in range(asked.repeats):
        for block in asked.blocks:
            loop = plain(asked.work, asked.rounds)
            speed = ours(asked.work, asked.rounds, block, method, asked.hosts)
            ratios[block].append(speed / loop)
            print(
                f"{asked.work} {asked.method} block {block}: {speed:.1f} clients/s, plain loop {loop:.1f}", flush=True
            )
    for block, found in ratios.items():
        spread = f"{min(found):.2f} … {max(found):.2f}"
        print(f"{asked.work} {asked.method} block {block}: {statistics.median(found):.2f} of the plain loop ({spread})")


if __name__ == "__main__":
    main()

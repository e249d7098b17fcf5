"""Measures the processor time of SCAFFOLD relative to FedAvg, round by round in turn in one process.

    python benchmarks/control_variates.py [w1 w3 …] [--rounds 60] [--kernels chain]

Two runs of a work of `fedfleet bench` go on in turn, one round each, on the local backend with blocks of one client. A
ratio is the processor time of a round of SCAFFOLD to that of the round of FedAvg right before it: medians (quartiles)
over the first and the second half of the rounds. In the first half most clients take part for the first time, and their
states need new memory.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import closing
from statistics import median, quantiles
from typing import Any

from fedfleet.engine.api import rounds
from fedfleet.engine.config.schema import experiment
from fedfleet.tune.bench.measure import METHODS
from fedfleet.tune.bench.works import FEDERATIONS

SKIPPED = 2
"""The number of first rounds that do not count."""


def started(work: str, method: str, count: int, kernels: str) -> Any:
    """The rounds of a run that has `count` rounds."""
    return rounds(
        experiment(
            {
                "plugins": ["fedfleet.tune.bench.works"],
                "workload": work,
                "method": METHODS[method],
                "federation": {**FEDERATIONS[work], "rounds": count},
                "engine": {"backend": "local", "block": 1, "kernels": kernels},
                "evaluate": {"every": 0},
                "tracking": {"uri": "none"},
            }
        )
    )


def milliseconds(records: Iterator[dict[str, Any]]) -> float:
    """The processor time of the next round, in ms per client."""
    began = time.process_time()
    record = next(records)
    return 1e3 * (time.process_time() - began) / record["client/count"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("works", nargs="*", default=["w1"])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--kernels", default="chain")
    asked = parser.parse_args()
    for work in asked.works:
        runs = (started(work, method, asked.rounds, asked.kernels) for method in ("fedavg", "scaffold"))
        with closing(next(runs)) as fedavg, closing(next(runs)) as scaffold:
            pairs = [(milliseconds(fedavg), milliseconds(scaffold)) for _ in range(asked.rounds)]
        half = asked.rounds // 2
        for name, part in (("first", pairs[SKIPPED:half]), ("second", pairs[half:])):
            low, middle, high = quantiles([ours / plain for plain, ours in part], n=4)
            plain, ours = (median(times) for times in zip(*part, strict=True))
            print(
                f"{work}, {name} half of {asked.rounds} rounds, {asked.kernels}: {middle:.2f} ({low:.2f}, {high:.2f}) "
                f"times FedAvg, {ours:.2f} and {plain:.2f} ms per client",
                flush=True,
            )


if __name__ == "__main__":
    main()

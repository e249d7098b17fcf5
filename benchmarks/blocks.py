"""Measures which block size is fastest on a processor. The rule for `engine.block=auto` follows these results.

    python benchmarks/blocks.py

FedAvg runs in this process on one thread. The script prints clients per second for each block size, medians over
rounds; the sizes are measured in turn.
"""

from __future__ import annotations

from statistics import median
from typing import Any

from fedfleet.engine import Experiment, run
from fedfleet.tune.bench.works import FEDERATIONS

SIZES = (1, 4, 10, 16, 32)
REPEATS = 3

WORKS: dict[str, dict[str, Any]] = {
    f"mlp on digits, {hidden} hidden": {
        "workload": {"name": "digits", "model": {"name": "mlp", "hidden": [hidden]}},
        "federation": {"clients": 100, "cohort": 32, "local": {"steps": 5, "batch": 32}},
    }
    for hidden in (64, 512, 1024)
} | {
    name: {"workload": name, "federation": {**plan, "cohort": 32}}
    for name, plan in FEDERATIONS.items()
    if name in ("w1", "w2")
}


def speed(work: dict[str, Any], block: int) -> tuple[float, int]:
    """(clients per second, median over the rounds after the first one; number of parameters of the model)."""
    experiment = Experiment.model_validate(
        {
            "plugins": ["fedfleet.tune.bench.works"],
            "workload": work["workload"],
            "method": {"name": "fedavg", "rule": {"name": "sgd", "lr": 0.05}},
            "federation": {**work["federation"], "rounds": 6},
            "engine": {"backend": "local", "block": block},
            "evaluate": {"every": 0},
            "tracking": {"uri": "none"},
        }
    )
    result = run(experiment)
    rates = [row["client/count"] / row["time/train"] for row in result.rows[1:]]
    return median(rates), sum(t.numel() for t in result.model.values())


def main() -> None:
    for name, work in WORKS.items():
        found: dict[int, list[float]] = {size: [] for size in SIZES}
        parameters = 0
        for _ in range(REPEATS):
            for size in SIZES:
                rate, parameters = speed(work, size)
                found[size].append(rate)
        line = "  ".join(f"{size}: {median(rates):.0f}" for size, rates in found.items())
        print(f"{name}, {parameters:,} parameters, clients/s by block size  {line}", flush=True)


if __name__ == "__main__":
    main()

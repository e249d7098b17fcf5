"""Finds the step sizes of the demo: runs each of its methods on digits over a small grid, in this process. The demo
uses the best ones.

python benchmarks/digits_steps.py
"""

from __future__ import annotations

from itertools import product
from statistics import mean
from typing import Any

from fedfleet.engine import run
from fedfleet.tune.demo import accuracies, rounds_to
from fedfleet.tune.files import load

RATES = (0.03, 0.1, 0.3, 1.0)
GRID: list[dict[str, Any]] = [
    *({"name": name, "rule": {"name": "sgd", "lr": lr}} for name, lr in product(("fedavg", "scaffold"), RATES)),
    *(
        {"name": name, "matrix_lr": matrices, "vector_lr": vectors}
        for name, matrices, vectors in product(("local_muon", "fedmuon_bc"), (0.01, 0.03, 0.1), (0.03, 0.1))
    ),
]


def main() -> None:
    base = load("digits", ("federation.rounds=100", "engine.backend=local", "tracking.uri=none"))
    for method in GRID:
        points = accuracies(run(base.model_copy(update={"method": method})).rows)
        late = mean(value for _, value in points[-5:])
        print(
            f"{method}: last five {late:.3f}, rounds to 80 % {rounds_to(points, 0.8)}, to 90 % {rounds_to(points, 0.9)}"
        )


if __name__ == "__main__":
    main()

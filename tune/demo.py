"""`make demo`: four methods on handwritten digits. 100 clients have few classes each, and 20 of them form a cohort.

The step sizes are the best of `python benchmarks/digits_steps.py`.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from ..engine.api import run
from ..engine.config.schema import Experiment
from ..engine.runs.launch import new_run_id
from ..engine.runs.result import Result
from .chart import curves
from .files import load
from .listing import columns
from .progress import Progress

METHODS: dict[str, tuple[str, ...]] = {
    "FedAvg": ("method.name=fedavg", "method.rule={name: sgd, lr: 0.3}"),
    "SCAFFOLD": ("method.name=scaffold", "method.rule={name: sgd, lr: 0.3}"),
    "LocalMuon": ("method.name=local_muon", "method.matrix_lr=0.1", "method.vector_lr=0.1"),
    "FedMuon-BC": ("method.name=fedmuon_bc", "method.matrix_lr=0.03", "method.vector_lr=0.1"),
}
COMMON = ("federation.rounds=100", "evaluate.every=5", "tracking.experiment=demo")
TARGETS = (0.8, 0.9)


def experiment(label: str, *more: str) -> Experiment:
    return load("digits", (*COMMON, *METHODS[label], *more))


def accuracies(result: Result) -> list[tuple[int, float]]:
    """(round, test accuracy) of the rounds that were evaluated."""
    return [(int(row["round"]), row["eval/accuracy"]) for row in result.rows if "eval/accuracy" in row]


def rounds_to(points: list[tuple[int, float]], target: float) -> str:
    """The first evaluated round whose accuracy is at least the target, as text."""
    return next((str(number) for number, value in points if value >= target), "–")


def table(results: dict[str, Result]) -> str:
    rows = [("method", "final accuracy", *(f"rounds to {t:.0%}" for t in TARGETS), "MB up", "seconds")]
    for label, result in results.items():
        points, summary = accuracies(result), result.summary()
        reached = (rounds_to(points, target) for target in TARGETS)
        sent = f"{summary['bytes_up'] / 1e6:.1f}"
        rows.append((label, f"{points[-1][1]:.1%}", *reached, sent, f"{summary['seconds']:.1f}"))
    return columns(rows)


def main() -> None:
    started, run_id = time.perf_counter(), new_run_id()
    folder = Path("runs") / f"demo-{run_id}"
    print("Four methods, 100 clients, cohorts of 20, Dirichlet 0.1, 100 rounds each, on Ray …", flush=True)
    results: dict[str, Result] = {}
    for label in METHODS:
        results[label] = run(experiment(label), folder / label.lower(), [Progress()])
        print(f"  {label}: {accuracies(results[label])[-1][1]:.1%}", flush=True)
    chart = folder / "accuracy.png"
    points: dict[str, Any] = {label: accuracies(result) for label, result in results.items()}
    curves(points, chart, "Digits, 100 clients, cohorts of 20, Dirichlet 0.1")
    print(f"\n{table(results)}\n\nchart: {chart}\nruns:  {folder}")
    print(f"took {time.perf_counter() - started:.0f} s. To look at the runs in MLflow:")
    print(f"  {os.path.relpath(Path(sys.executable).parent / 'mlflow')} ui --backend-store-uri sqlite:///mlflow.db")
    print("  and open http://127.0.0.1:5000/#/experiments?workflowType=machine_learning")


if __name__ == "__main__":
    main()

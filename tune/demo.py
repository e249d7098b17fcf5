"""`make demo`: runs the study `demo`, prints a table, and draws a chart."""

from __future__ import annotations

from .keyboard import arm, finish

if __name__ == "__main__":
    arm()  # before the other imports, which take some time

import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..engine.errors import FedFleetError, Interrupted
from .executor.fork_server import begin
from .exit_status import report_errors
from .listing import columns
from .page import svg
from .page.content import Axis, Chart, Curve
from .study.folder import StudyFolder
from .study.spec import load


def accuracies(rows: Iterable[Mapping[str, Any]]) -> list[tuple[int, float]]:
    """(round, test accuracy) of the rounds that were evaluated. rows: the records of a run."""
    return [(int(row["round"]), row["eval/accuracy"]) for row in rows if "eval/accuracy" in row]


def rounds_to(points: Sequence[tuple[int, float]], target: float) -> str:
    """The first evaluated round whose accuracy is at least the target, as text. points: (round, accuracy)."""
    return next((str(number) for number, value in points if value >= target), "–")


def table(folder: StudyFolder, curves: Mapping[str, Sequence[tuple[int, float]]]) -> str:
    """A line for each method. curves: label -> (round, test accuracy)."""
    targets = folder.study.report.targets
    rows = [("method", "final accuracy", *(f"rounds to {t:.0%}" for t in targets), "MB up", "seconds")]
    for cell in folder.cells():
        points, result = curves[cell.method], folder.result(cell)
        reached = (rounds_to(points, target) for target in targets)
        sent = f"{result['bytes_up'] / 1e6:.1f}"
        rows.append((cell.method, f"{points[-1][1]:.1%}", *reached, sent, f"{result['seconds']:.1f}"))
    return columns(rows)


def learning_curves(curves: Mapping[str, Sequence[tuple[int, float]]]) -> Chart:
    """One curve for each method. curves: label -> (round, test accuracy)."""
    series = [
        Curve(f"{label} ({points[-1][1]:.1%})", i, {"round": [p[0] for p in points]}, [100 * p[1] for p in points])
        for i, (label, points) in enumerate(curves.items())
    ]
    title = "Digits, 100 clients, cohorts of 20, Dirichlet 0.1"
    return Chart("curves", title, Axis("round", whole=True), Axis("test accuracy (%)"), series)


def run_all(path: Path) -> StudyFolder:
    """Run the study in a folder. Raises FedFleetError if a method has no result."""
    from .study_run.runner import run_study

    try:
        outcome, _ = run_study(load("demo"), path)
    except Interrupted as error:
        raise Interrupted(error.signal, f"; to go on: fedfleet study demo --out {path}") from None
    if outcome.failed or outcome.diverged:
        raise FedFleetError(f"{outcome.failed + outcome.diverged} methods have no result; see {path / 'report.md'}")
    return StudyFolder(path)


@report_errors
def demo() -> None:
    """Run the study and show what came out."""
    started = time.perf_counter()
    begin()  # the processes of the runs import beside this one

    from ..engine.runs.launch import new_run_id
    from ..engine.runs.saved_files import read_rows

    path = Path("runs") / f"demo-{new_run_id()}"
    print("Four methods, 100 clients, cohorts of 20, Dirichlet 0.1, 100 rounds each …", flush=True)
    folder = run_all(path)
    lines = {cell.method: accuracies(read_rows(folder.of(cell) / "rounds.parquet")) for cell in folder.cells()}
    chart = path / "accuracy.png"
    svg.save(learning_curves(lines), chart)
    print(f"\n{table(folder, lines)}\n\nchart:  {chart}\nreport: {path / 'report.html'}")
    print(f"took {time.perf_counter() - started:.0f} s. To look at the runs in MLflow:")
    print(f"  {os.path.relpath(Path(sys.executable).parent / 'mlflow')} ui --backend-store-uri sqlite:///mlflow.db")
    print("  and open http://127.0.0.1:5000/#/experiments?workflowType=machine_learning")


if __name__ == "__main__":
    finish(demo)

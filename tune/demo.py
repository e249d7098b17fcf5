"""`make demo`: runs the study `demo`, prints its report, and draws its learning curves."""

from __future__ import annotations

from .executor.fork_server import begin
from .keyboard import arm, finish

if __name__ == "__main__":
    arm()  # before the other imports, which take some time
    begin()  # the processes of the runs import beside this one

import os
import sys
import time
from pathlib import Path

import psutil

from ..engine.errors import FedFleetError, Interrupted
from ..engine.runs.prepare import new_run_id
from .exit_status import report_errors
from .page import svg
from .report.charts import curves
from .report.findings import findings
from .study.folder import StudyFolder
from .study.spec import load
from .study_run.runner import run_study


def run_all(path: Path) -> str:
    """Run the study in a folder; returns its report as text. Raises FedFleetError if a method has no result."""
    try:
        outcome, text = run_study(load("demo"), path)
    except Interrupted as error:
        raise Interrupted(error.signal, f"; to go on: fedfleet study demo --out {path}") from None
    if outcome.failed or outcome.diverged:
        raise FedFleetError(f"{outcome.failed + outcome.diverged} methods have no result; see {path / 'report.md'}")
    return text


@report_errors
def demo() -> None:
    """Run the study and show what came out."""
    path = Path("runs") / f"demo-{new_run_id()}"
    print("Four methods, 100 clients, cohorts of 20, Dirichlet 0.1, 100 rounds each …", flush=True)
    text, chart = run_all(path), path / "accuracy.png"
    (curves_of_methods,) = curves(findings(StudyFolder(path)))
    svg.save(curves_of_methods, chart)
    print(f"\n{text}\n\nchart:  {chart}\nreport: {path / 'report.html'}")
    print(f"took {time.time() - psutil.Process().create_time():.0f} s. To look at the runs in MLflow:")
    print(f"  {os.path.relpath(Path(sys.executable).parent / 'mlflow')} ui --backend-store-uri sqlite:///mlflow.db")
    print("  and open http://127.0.0.1:5000/#/experiments?workflowType=machine_learning")


if __name__ == "__main__":
    finish(demo)

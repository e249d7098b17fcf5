"""Progress of a run: one line with the round, loss, accuracy and clients per second; on a terminal with a bar."""

from __future__ import annotations

import sys
from typing import Any

from ..engine.config.run_spec import RunSpec
from ..engine.rounds.driver import Record
from ..engine.runs.observer import Observer
from ..engine.runs.result import Result

SHOWN = ("loss", "accuracy", "clients/s")


class Progress(Observer):
    """An observer that updates the line on a terminal or below the cell of a notebook. It prints nothing elsewhere."""

    def __init__(self) -> None:
        self.bar: Any = None
        self.cell: Any = None  # IPython's handle of the line in a notebook
        self.task: Any = None
        self.rounds: int = 0
        self.shown: dict[str, str] = {}

    def begin(self, run_spec: RunSpec, facts: dict[str, Any]) -> None:
        self.rounds = run_spec.last_round
        if in_notebook():
            from IPython.display import display

            self.cell = display({"text/plain": "starting"}, raw=True, display_id=True)
        if not sys.stderr.isatty():
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self.bar = Progress(
            TextColumn("round"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self.bar.start()
        self.task = self.bar.add_task("starting", total=self.rounds)

    def record(self, record: Record) -> None:
        if self.bar is None and self.cell is None:
            return
        self.shown["loss"] = f"{record['train/loss']:.4f}"
        if "eval/accuracy" in record:
            self.shown["accuracy"] = f"{record['eval/accuracy']:.2%}"
        self.shown["clients/s"] = f"{record['client/count'] / record['time/seconds']:.0f}"
        text = "  ".join(f"{name} {self.shown[name]}" for name in SHOWN if name in self.shown)
        if self.cell is not None:
            line = f"round {record['round']:.0f} of {self.rounds}  {text}"
            self.cell.update({"text/plain": line}, raw=True)
        if self.bar is not None:
            self.bar.update(self.task, completed=record["round"], description=text)

    def event(self, text: str) -> None:
        if self.bar is not None:
            self.bar.console.print(text.split("\n")[0], highlight=False, markup=False)

    def end(self, result: Result) -> None:
        self._stop()

    def failed(self, error: BaseException) -> None:
        self._stop()

    def _stop(self) -> None:
        if self.bar is not None:
            self.bar.stop()


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None

"""Progress of a study on standard error."""

from __future__ import annotations

from collections.abc import Sequence

from ...engine.rounds.driver import Record
from ..executor.observed import RunsObserver
from ..progress import ProgressOfRuns
from ..study.cells import Cell
from ..study.folder import DIVERGED, FINISHED, StudyFolder
from ..study.spec import Study
from ..units import shown


class StudyProgress(ProgressOfRuns, RunsObserver[Cell]):
    """An observer that prints the cells that end, and a live line on a terminal."""

    def __init__(self, study: Study, folder: StudyFolder) -> None:
        super().__init__()
        self.study, self.folder = study, folder
        self.best: tuple[float, str] | None = None

    def begins(self, what: str, total: int, ended: Sequence[Cell]) -> None:
        for cell in ended:
            self._better(cell)
        self.close()
        self.open(what, total, len(ended))

    def run_begins(self, run: Cell, rounds: int) -> None:
        self.advance(run.key, run.label, 0.0)

    def run_rounds(self, run: Cell, rows: list[Record]) -> None:
        if rows:
            self.advance(run.key, run.label, rows[-1]["round"] / int(run.data["federation"]["rounds"]))

    def run_ends(self, run: Cell) -> None:
        self._better(run)
        self.finish(run.key)
        chosen = f" ({run.chosen})" if run.settings else ""
        line = f"{self.what} {self.done}/{self.total}  {run.label}{chosen}: {self._outcome(run)}"
        self.say(line, f"; {self.state()}")

    def pauses(self) -> None:
        self.close()

    def ends(self, status: str) -> None:
        self.close()

    def best_text(self) -> str:
        return f", best {self._value(self.best[0])} {self.best[1]}" if self.best else ""

    def _outcome(self, cell: Cell) -> str:
        status = self.folder.status(cell)
        if status == FINISHED:
            return self._value(self.folder.final(cell, self.study.report.metric, self.study.report))
        if status == DIVERGED:
            return status
        return f"failed: {self.folder.failure(cell).get('reason', 'no reason is known')}"

    def _value(self, number: float) -> str:
        return shown(self.study.report.metric, number)

    def _better(self, cell: Cell) -> None:
        value = self.folder.final(cell, self.study.report.metric, self.study.report)
        sign = 1 if self.study.report.best == "max" else -1
        if value == value and (self.best is None or sign * value > sign * self.best[0]):
            self.best = (value, cell.label)

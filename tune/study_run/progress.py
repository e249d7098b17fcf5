"""Progress of a study on standard error."""

from __future__ import annotations

from ..progress import ProgressOfRuns
from ..quantities import shown
from ..study.cells import Cell
from ..study.folder import FAILED, FINISHED, Folder
from ..study.spec import Study


class StudyProgress(ProgressOfRuns):
    """Prints the cells that end, and a live line on a terminal."""

    def __init__(self, study: Study, folder: Folder, quiet: bool = False) -> None:
        super().__init__(quiet)
        self.study, self.folder = study, folder
        self.best: tuple[float, str] | None = None

    def begins(self, what: str, total: int, old: list[Cell]) -> None:
        """A stage of cells or trials begins. old: those of them that were over before."""
        for cell in old:
            self._better(cell)
        self.open(what, total, len(old))

    def cell_runs(self, cell: Cell, round: float = 0) -> None:
        """A cell is under way. round: its last round."""
        self.advance(cell.key, cell.label, round / int(cell.data["federation"]["rounds"]))

    def cell_ends(self, cell: Cell, status: str) -> None:
        """A cell has ended."""
        self._better(cell)
        self.finish(cell.key)
        outcome = status
        if status == FINISHED:
            outcome = self._value(self.folder.final(cell, self.study.report.metric, self.study.report))
        elif status == FAILED:
            outcome = f"failed: {self.folder.failure(cell).get('reason', 'no reason is known')}"
        chosen = f" ({cell.chosen})" if cell.settings else ""
        self.say(f"{self.what} {self.done}/{self.total}  {cell.label}{chosen}: {outcome}", f"; {self.state()}")

    def best_text(self) -> str:
        return f", best {self._value(self.best[0])} {self.best[1]}" if self.best else ""

    def _value(self, number: float) -> str:
        return shown(self.study.report.metric, number)

    def _better(self, cell: Cell) -> None:
        value = self.folder.final(cell, self.study.report.metric, self.study.report)
        sign = 1 if self.study.report.best == "max" else -1
        if value == value and (self.best is None or sign * value > sign * self.best[0]):
            self.best = (value, cell.label)

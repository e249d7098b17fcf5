"""Progress of a study on standard error."""

from __future__ import annotations

from ..progress import ProgressOfRuns
from ..study.cells import Cell
from ..study.folder import DIVERGED, FINISHED, StudyFolder
from ..study.spec import Study
from ..units import shown


class StudyProgress(ProgressOfRuns[Cell]):
    """The progress of a study."""

    def __init__(self, study: Study, folder: StudyFolder) -> None:
        super().__init__(study.report.metric, study.report.best == "max")
        self.report, self.folder = study.report, folder

    def key(self, run: Cell) -> str:
        return run.key

    def label(self, run: Cell) -> str:
        return run.label

    def value(self, run: Cell) -> float:
        return self.folder.final(run, self.report.metric, self.report)

    def lines(self, run: Cell) -> tuple[str, str]:
        status = outcome = self.folder.status(run)
        if status == FINISHED:
            outcome = shown(self.metric, self.value(run))
        elif status != DIVERGED:
            outcome = f"failed: {self.folder.failure(run).get('reason', 'no reason is known')}"
        chosen = f" ({run.chosen})" if run.settings else ""
        return f"{self.what} {self.done}/{self.total}  {run.label}{chosen}: {outcome}", f"; {self.state()}"

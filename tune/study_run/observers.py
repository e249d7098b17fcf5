"""What observes the cells of a study: progress on standard error, and its trackers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...engine.config.registry import find_plugin
from ...engine.config.schema import experiment
from ...engine.run_spec import RunSpec
from ..page import svg
from ..progress import ProgressOfRuns
from ..report.charts import single
from ..run_files import read_json
from ..study.cells import Cell
from ..study.folder import DIVERGED, FINISHED, StudyFolder
from ..study.spec import Study
from ..tracking.many_runs import TrackerOfRuns
from ..tracking.model import kept_model
from ..tracking.origin import origin
from ..tracking.run_header import header_of
from ..tracking.writer import End, RunHeader
from ..units import evaluated_rows, shown


class StudyProgress(ProgressOfRuns[Cell]):
    """The progress of a study."""

    def __init__(self, study: Study, folder: StudyFolder) -> None:
        super().__init__(study.report.metric, study.report.best == "max")
        self.study, self.folder = study, folder

    def label(self, run: Cell) -> str:
        return run.label

    def begins(self, what: str, total: int, ended: Sequence[Cell]) -> None:
        """Trials are ranked by what decides, and cells and forks by what is reported."""
        self.by = self.study.decided_by if what == "trial" else self.study.report_of
        if what != "fork":
            self.best = None
        report = self.by(next(iter(self.study.methods)))
        self.metric, self.largest = report.metric, report.best == "max"
        super().begins(what, total, ended)

    def value(self, run: Cell) -> float:
        report = self.by(run.method)
        return self.folder.final(run, report.metric, report)

    def lines(self, run: Cell) -> tuple[str, str]:
        status = outcome = self.folder.status(run)
        if status == FINISHED:
            outcome = shown(self.by(run.method).metric, self.value(run))
        elif status != DIVERGED:
            outcome = f"failed: {self.folder.failure(run).get('reason', 'no reason is known')}"
        chosen = f" ({run.chosen})" if run.settings else ""
        return f"{self.what} {self.done}/{self.total}  {run.label}{chosen}: {outcome}", f"; {self.state()}"


class StudyTracker(TrackerOfRuns[Cell]):
    """Writes a study to its trackers: a run for the study, and one for every cell when it is over, from the files in
    its folder. The trials of tuning are not written, but the stores are opened while they run."""

    what = "study"
    child_tag = "fedfleet.cell"
    files = ("report.html", "report.md", "charts")

    def __init__(self, study: Study, folder: StudyFolder) -> None:
        self.study, self.study_folder = study, folder
        self.tunes = False  # whether the runs under way are trials
        tracking = study.tracking
        super().__init__(tracking, tracking.experiment or study.name, folder.path, tracking.system)

    def plain(self) -> dict[str, Any]:
        return self.study.plain()

    def header(self) -> RunHeader:
        return RunHeader(self.study.name, {**self._tags(), "kind": "study"})

    def begins(self, what: str, total: int, ended: Sequence[Cell]) -> None:
        self.tunes = what == "trial"
        for cell in ended:
            self._add(cell, before=True)

    def run_ends(self, run: Cell) -> None:
        self._add(run, before=False)

    def _add(self, cell: Cell, before: bool) -> None:
        """Write a cell that is over. before: whether it was over when the study began; the store may then have it."""
        if self.tunes:
            if not self.has_content:
                self.has_content = True
                for writer in self.writers:
                    writer.open_early()
            return
        self.begin(cell.key, lambda: self._header(cell))
        status, reason = self.study_folder.status(cell), self.study_folder.failure(cell).get("reason", "")
        place = self.study_folder.of(cell)
        texts, model = (lambda: self._curve(cell)), kept_model(place, lambda: experiment(cell.data))
        named = {"name": cell.label, "labels": self._labels(cell)}
        self.write(End(cell.key, status, reason, place, True, before, texts=texts, model=model, **named))

    def _tags(self) -> dict[str, str]:
        reduced = "; ".join(self.study.notes) or "no"
        plugins = [find_plugin(name) for name in self.study.plugins]
        return {"study": self.study.name, "paper": self.study.paper, "reduced": reduced, **origin(plugins)}

    def _labels(self, cell: Cell) -> dict[str, str]:
        """The tags with what the study calls a cell, which may change while the cell's results stay."""
        axes = {f"axis.{name}": label for name, label in zip(self.study.axes, cell.place, strict=True)}
        named = {"method": cell.method, "level": ", ".join(cell.place), **axes}
        return {name: label for name, label in named.items() if label}

    def _header(self, cell: Cell) -> RunHeader:
        place = self.study_folder.of(cell)
        return header_of(
            RunSpec.of(self.study_folder.result(cell).get("run_id", ""), experiment(cell.data)),
            cell.label,
            place,
            **{**self._tags(), **sources_of(place), **self._labels(cell)},
        )

    def _curve(self, cell: Cell) -> dict[str, str]:
        report = self.study.report_of(cell.method)
        points = self.study_folder.points(cell, report.metric)
        if points is None or self.study_folder.status(cell) != FINISHED:
            return {}
        rows = evaluated_rows([cell.data.get("workload")])
        return {"curve.svg": svg.chart(single(points, report, cell.label, rows), "curve")}


def sources_of(run: Path) -> dict[str, str]:
    """The tags with the version and the commit of this package that a run was made with, which may be another one than
    is here; "" for what its folder does not say, {} for a run that has recorded nothing."""
    recorded = read_json(run / "environment.json")
    if not recorded:
        return {}
    version = recorded.get("packages", {}).get("fedfleet", "")
    return {"fedfleet.version": version, "fedfleet.commit": recorded.get("commit") or ""}

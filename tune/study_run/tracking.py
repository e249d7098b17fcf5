"""Tracks a study in MLflow: an experiment and a parent run for the study, and a nested run for every cell and seed.

A cell's run is written when the cell is over, from the files in its folder. Cells do not write to the store.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from ...engine.config.registry import find_plugin
from ...engine.config.schema import experiment
from ...engine.run_spec import RunSpec
from ...engine.runs.saved_files import load_model
from ...engine.storage.secrets import redacted_data
from ..page import svg
from ..report.charts import single
from ..study.cells import Cell
from ..study.folder import FINISHED, Folder
from ..study.spec import Study
from ..tracking.mlflow_writer import TOP, End, Writer
from ..tracking.origin import origin
from ..tracking.run import model_of
from ..tracking.run_header import RunHeader, header_of
from ..tracking.stores import store


class StudyTracker:
    """Writes a study to MLflow: `add` the cells that are over, and `close` at the end."""

    def __init__(self, study: Study, folder: Folder) -> None:
        self.study, self.folder = study, folder
        name = study.tracking.experiment or study.name
        self.writer = None
        if study.tracking.uri != "none":
            uri, system = store(study.tracking.uri), study.tracking.system
            self.writer = Writer(uri, name, folder.path, "study", "fedfleet.cell", system=system)
            self.writer.begin(TOP, lambda: RunHeader(study.name, {**self._tags(), "kind": "study"}))
        self.opened = False

    def open(self) -> None:
        """Open the store while the trials of tuning run, the first of which has ended."""
        if self.writer is not None and not self.opened:
            self.opened = True
            self.writer.open_early()

    def add(self, cell: Cell, before: bool) -> None:
        """Write a cell that is over. before: whether it was over when the study began; the store may then have it."""
        if self.writer is None:
            return
        self.writer.begin(cell.key, lambda: self._header(cell))
        status, reason = self.folder.status(cell), self.folder.failure(cell).get("reason", "")
        place = self.folder.of(cell)
        texts, model = (lambda: self._curve(cell)), self._model(cell)
        named = {"name": cell.label, "labels": self._labels(cell)}
        self.writer.end(End(cell.key, status, reason, place, True, before, texts=texts, model=model, **named))

    def close(self, status: str) -> None:
        """End the study's run. status: finished or killed."""
        if self.writer is not None:
            names = ("report.html", "report.md", "charts")
            files = tuple(self.folder.path / name for name in names)
            self.writer.end(End(TOP, status, files=files, texts=self._settings))
            self.writer.close()

    def _settings(self) -> dict[str, str]:
        """study.yaml without the secrets that the file in the folder has."""
        return {"study.yaml": yaml.safe_dump(redacted_data(self.study.model_dump(mode="json")), sort_keys=False)}

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
        return header_of(
            RunSpec.of(self.folder.result(cell).get("run_id", ""), experiment(cell.data)),
            cell.label,
            self.folder.of(cell),
            **self._tags(),
            **self._labels(cell),
        )

    def _model(self, cell: Cell) -> Callable[[Path], Any] | None:
        """Exports the final model of a cell; None unless the study keeps its models."""
        file = self.folder.of(cell) / "model.safetensors"
        if not file.is_file():
            return None
        return model_of(RunSpec.of("model", experiment(cell.data)), lambda: load_model(file))

    def _curve(self, cell: Cell) -> dict[str, str]:
        points = self.folder.points(cell, self.study.report.metric)
        if points is None or self.folder.status(cell) != FINISHED:
            return {}
        return {"curve.svg": svg.chart(single(points, self.study.report, cell.label), "curve")}

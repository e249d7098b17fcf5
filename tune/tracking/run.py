"""Tracks a single run as a run of MLflow: flattened parameters, metrics with step = round, tags and artifacts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from ...engine.errors import ConfigError, Diverged, Interrupted
from ...engine.rounds.driver import Record
from ...engine.run_spec import RunSpec
from ...engine.runs.observer import Observer
from ...engine.runs.result import Result
from ..page.html import render
from ..run_report import page_of
from .mlflow_writer import MlflowWriter, kept
from .model import model_of
from .run_header import RunHeader, header_of, name_of
from .stores import store
from .writer import REPORT, TOP, End


class MlflowTracker(Observer):
    """An observer that writes a run to MLflow."""

    def __init__(self, uri: str = "auto", experiment: str = "default", directory: str | None = None) -> None:
        """uri: of the store, or auto. experiment: name of MLflow's experiment. directory: the run's folder, or None.

        The file mlflow.json in the run's folder names the MLflow run in which a resumed run continues.
        """
        self.folder, self.experiment = Path(directory) if directory else None, experiment
        before = kept(self.folder).get("uri", "")
        file = before.removeprefix("sqlite:///")
        if uri == "auto" and file != before and Path(file).is_file():
            uri = before  # the store of the run's first part, whatever the current folder is
        self.uri = store(uri)
        self.rounds = 0

    def begin(self, run_spec: RunSpec, facts: dict[str, Any]) -> None:
        self.run_spec = run_spec
        resumes, system = run_spec.resume, run_spec.experiment.tracking.system
        self.writer = MlflowWriter(self.uri, self.experiment, self.folder, "run", resumes=resumes, system=system)
        self.writer.begin(TOP, self._header)

    def _header(self) -> RunHeader:
        made = self.run_spec.experiment
        name = f"{name_of(made.method)}-{name_of(made.workload)}-{self.run_spec.run_id}"
        return header_of(self.run_spec, name, self.folder)

    def record(self, record: Record) -> None:
        """A round is repeated if a lost node held states of clients. All its numbers are then the same, except the
        times: MLflow keeps the times of the first execution, the run's folder those of the last."""
        if record["round"] > self.rounds:
            self.rounds = int(record["round"])
            self.writer.rounds(TOP, [record])

    def resumed(self, records: list[Record]) -> None:
        """Most of these records are in the store already; a killed launcher may not have written the last ones."""
        for record in records:
            self.record(record)

    def end(self, result: Result) -> None:
        self._close("finished", model_of(self.run_spec, lambda: result.model))

    def failed(self, error: BaseException) -> None:
        if isinstance(error, ConfigError) and self.rounds == 0:
            self.writer.close()  # the run could not begin
        elif isinstance(error, Interrupted | KeyboardInterrupt) and self.rounds == 0:
            self.writer.abandon()
        elif isinstance(error, Interrupted | KeyboardInterrupt | SystemExit):
            self._close("interrupted")
        else:
            self._close("diverged" if isinstance(error, Diverged) else type(error).__name__)

    def _close(self, status: str, model: Callable[[Path], Any] | None = None) -> None:
        self.writer.end(End(TOP, status, folder=self.folder, texts=self._texts, model=model))
        self.writer.close()

    def _texts(self) -> dict[str, str]:
        """Artifact texts: the report, or the configuration of a run without a folder."""
        if self.folder is not None:
            return {REPORT: render(page_of(self.folder))}
        return {"config.yaml": yaml.safe_dump(self.run_spec.experiment.plain(), sort_keys=False)}

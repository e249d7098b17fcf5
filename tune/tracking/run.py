"""Tracks a single run: its settings, the records of its rounds, how it ended, and its report."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import yaml

from ...engine.errors import ConfigError, Diverged, Interrupted
from ...engine.rounds.driver import Record
from ...engine.run_spec import RunSpec
from ...engine.runs.observer import Observer
from ...engine.runs.result import Result
from .from_folder import report
from .mlflow_writer import kept
from .model import model_of
from .run_header import header_of, name_of
from .stores import store
from .writer import TOP, End, RunHeader, package_is_there
from .writers import WRITERS, Target


class RunTracker(Observer):
    """An observer that writes a run by the writer that has the name `kind`."""

    kind: ClassVar[str]
    package: ClassVar[str] = ""  # which not every installation has
    uri = "auto"

    def __init__(self, experiment: str = "fedfleet", directory: str | None = None) -> None:
        """experiment: name of MLflow's experiment, or of W&B's project. directory: the run's folder, or None.
        Raises ConfigError where the writer's package is missing, before the run has begun."""
        if self.package:
            package_is_there(self.package, self.kind)
        self.folder, self.experiment = Path(directory) if directory else None, experiment
        self.rounds = 0
        self.has_writer = False

    def begin(self, run_spec: RunSpec) -> None:
        self.run_spec, system = run_spec, run_spec.experiment.tracking.system
        target = Target(
            "run", self.folder, run_spec.run_id, self.uri, self.experiment, resumes=run_spec.resume, system=system
        )
        self.writer, self.has_writer = WRITERS[self.kind](target), True
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
        self._close("finished", model_of(self.run_spec, lambda: result.model, self.folder), result.stopped)

    def failed(self, error: BaseException) -> None:
        if not self.has_writer:
            return  # a package is missing
        if isinstance(error, ConfigError) and self.rounds == 0:
            self.writer.close()  # the run could not begin
        elif isinstance(error, Interrupted | KeyboardInterrupt) and self.rounds == 0:
            self.writer.abandon()
        elif isinstance(error, Interrupted | KeyboardInterrupt | SystemExit):
            self._close("interrupted")
        else:
            self._close("diverged" if isinstance(error, Diverged) else type(error).__name__)

    def _close(self, status: str, model: Callable[[Path], Any] | None = None, reason: str = "") -> None:
        self.writer.end(End(TOP, status, reason, folder=self.folder, texts=self._texts(), model=model))
        self.writer.close()

    def _texts(self) -> Callable[[], dict[str, str]]:
        """Returns artifact texts: the report, or the configuration of a run without a folder."""
        if self.folder is not None:
            return partial(report, self.folder)
        return partial(dict, {"config.yaml": yaml.safe_dump(self.run_spec.experiment.plain(), sort_keys=False)})


class MlflowTracker(RunTracker):
    """Writes a run to MLflow."""

    kind = "mlflow"

    def __init__(self, uri: str = "auto", experiment: str = "fedfleet", directory: str | None = None) -> None:
        """uri: of the store, or auto. The other arguments are those of `RunTracker`.

        The file mlflow.json in the run's folder names the MLflow run in which a resumed run continues.
        """
        super().__init__(experiment, directory)
        before = kept(self.folder).get("uri", "")
        file = before.removeprefix("sqlite:///")
        if uri == "auto" and file != before and Path(file).is_file():
            uri = before  # the store of the run's first part, whatever the current folder is
        self.uri = store(uri)


class TensorBoardTracker(RunTracker):
    """Writes the event files of a run for TensorBoard."""

    kind, package = "tensorboard", "tensorboardX"


class WandbTracker(RunTracker):
    """Writes a run to Weights & Biases."""

    kind = package = "wandb"


class CsvTracker(RunTracker):
    """Writes rounds.csv in the folder of a run."""

    kind = "csv"

"""Tracks a search in MLflow: a run for the search and a nested run for each trial, metrics with step = round.

Trials do not write to the store. What a killed process had not written yet is read from the trials' folders.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from ...engine.config.registry import find_plugin
from ...engine.config.schema import Experiment, Tracking
from ...engine.errors import ConfigError
from ...engine.rounds.driver import Record
from ...engine.run_spec import RunSpec
from ...engine.runs.saved_files import load_model
from ...engine.storage.secrets import redacted_data
from ..ranges import decided
from ..tracking.mlflow_writer import TOP, End, Writer
from ..tracking.origin import origin
from ..tracking.run import model_of
from ..tracking.run_header import RunHeader, header_of
from ..tracking.stores import store
from .folder import trial_folder
from .plan import Plan
from .trial_source import SearchObserver
from .trial_store import Trial


class SearchTracker(SearchObserver):
    """An observer that writes a search to MLflow. parent: id of an MLflow run in which the search's run is nested."""

    def __init__(self, plan: Plan, tracking: Tracking, folder: Path, search_id: str, parent: str | None) -> None:
        self.plan, self.tracking, self.folder, self.search_id, self.parent = plan, tracking, folder, search_id, parent
        self.uri = store(tracking.uri)
        self.has_content = False  # whether there is anything to write

    def begins(self, trials: list[Trial]) -> None:
        name, system = self.tracking.experiment, self.tracking.system
        self.writer = Writer(self.uri, name, self.folder, "search", "fedfleet.trial", system=system)
        self.writer.begin(TOP, self._header)
        for trial in trials:
            if trial.status != "running":
                self._begin(trial.number, trial.params)
                self._end(trial, whole=True)

    def trial_begins(self, number: int, params: dict[str, Any], experiment: Experiment | None) -> None:
        self._begin(number, params)

    def trial_rounds(self, number: int, rows: list[Record]) -> None:
        self.has_content = self.has_content or bool(rows)
        self.writer.rounds(str(number), rows)

    def trial_ends(self, trial: Trial) -> None:
        self._end(trial, whole=False)

    def ends(self, status: str) -> None:
        if self.has_content:
            files = tuple(self.folder / name for name in ("best.yaml", "result.json", "report.html"))
            self.writer.end(End(TOP, status.lower(), files=files, texts=self._settings))
        self.writer.close()

    def _settings(self) -> dict[str, str]:
        """search.yaml without the secrets that the file in the folder has."""
        return {"search.yaml": yaml.safe_dump(redacted_data(self.plan.plain()), sort_keys=False)}

    def _header(self) -> RunHeader:
        kind = {"fedfleet.search_id": self.search_id, "kind": "search"}
        outer = {"mlflow.parentRunId": self.parent} if self.parent else {}
        asked = {key: value for key, value in self.plan.plain().items() if key not in ("tracking", "plugins")}
        plugins = [find_plugin(name) for name in self.plan.data.get("plugins", ())]
        tags = {**origin(plugins), **kind, **outer}
        return RunHeader(str(self.plan.data.get("name") or "search"), tags, redacted_data(asked))

    def _begin(self, number: int, params: dict[str, Any]) -> None:
        self.writer.begin(str(number), lambda: self._header_of(number, params))

    def _header_of(self, number: int, params: dict[str, Any]) -> RunHeader:
        """The header of a trial with these values, by dotted key."""
        run_id, name = f"{self.search_id}-{number:04d}", f"{number:04d}"
        try:
            run_spec = RunSpec.of(run_id, self.plan.experiment(params))
        except ConfigError:  # values that exclude each other: the trial has failed, and there is no run
            settings = {key: value for key, value in decided(self.plan.data, params).items() if key != "tracking"}
            return RunHeader(name, {"fedfleet.run_id": run_id}, redacted_data(settings))
        return header_of(run_spec, name, self._folder(number))

    def _end(self, trial: Trial, whole: bool) -> None:
        """whole: whether the trial is from an earlier part of the search, which may not have written all of it."""
        self.has_content = True
        key, objectives = str(trial.number), dict(zip(self.plan.settings.objectives, trial.values, strict=False))
        records: tuple[tuple[str, Record], ...] = ()
        if objectives:
            own = {f"objective/{name}": value for name, value in objectives.items()}
            records = ((key, {"round": 0, **own}), (TOP, {"round": trial.number, **objectives}))
        folder = self._folder(trial.number) if whole or trial.status == "finished" else None
        model = self._model(trial)
        self.writer.end(End(key, trial.status, trial.reason, folder, whole, whole, records, model=model))

    def _folder(self, number: int) -> Path:
        return trial_folder(self.folder, number)

    def _model(self, trial: Trial) -> Callable[[Path], Any] | None:
        """Exports the final model of a trial; None unless the search keeps its models."""
        file = self._folder(trial.number) / "model.safetensors"
        if trial.status != "finished" or not file.is_file():
            return None
        return model_of(RunSpec.of("model", self.plan.experiment(trial.params)), lambda: load_model(file))

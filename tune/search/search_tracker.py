"""Tracks a search in MLflow: a run for the search and a nested run for each trial, metrics with step = round."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...engine.config.registry import find_plugin
from ...engine.config.schema import Tracking
from ...engine.errors import ConfigError
from ...engine.rounds.driver import Record
from ...engine.run_spec import RunSpec
from ...engine.storage.secrets import redacted_data
from ..ranges import decided
from ..tracking.many_runs import TrackerOfRuns
from ..tracking.model import kept_model
from ..tracking.origin import origin
from ..tracking.run_header import RunHeader, header_of
from ..tracking.writer import TOP, End
from .folder import trial_folder
from .plan import SearchPlan
from .trial_store import Trial


class SearchTracker(TrackerOfRuns[Trial]):
    """An observer that writes a search to MLflow."""

    what = "search"
    child_tag = "fedfleet.trial"
    files = ("best.yaml", "result.json", "report.html")

    def __init__(self, plan: SearchPlan, tracking: Tracking, folder: Path, search_id: str) -> None:
        self.plan, self.search_id = plan, search_id
        super().__init__(tracking.uri, tracking.experiment, folder, tracking.system)

    def plain(self) -> dict[str, Any]:
        return self.plan.plain()

    def header(self) -> RunHeader:
        kind = {"fedfleet.search_id": self.search_id, "kind": "search"}
        asked = {key: value for key, value in self.plain().items() if key not in ("tracking", "plugins")}
        plugins = [find_plugin(name) for name in self.plan.data.get("plugins", ())]
        tags = {**origin(plugins), **kind}
        return RunHeader(str(self.plan.data.get("name") or "search"), tags, redacted_data(asked))

    def begins(self, what: str, total: int, ended: Sequence[Trial]) -> None:
        for trial in ended:
            self.run_begins(trial, 0)
            self._end(trial, whole=True)

    def run_begins(self, run: Trial, rounds: int) -> None:
        self.writer.begin(str(run.number), lambda: self._header_of(run))

    def run_rounds(self, run: Trial, rows: list[Record]) -> None:
        self.has_content = self.has_content or bool(rows)
        self.writer.rounds(str(run.number), rows)

    def run_ends(self, run: Trial) -> None:
        self._end(run, whole=False)

    def _header_of(self, trial: Trial) -> RunHeader:
        """The header of a trial's run."""
        name = f"{trial.number:04d}"
        run_id = f"{self.search_id}-{name}"
        try:
            run_spec = RunSpec.of(run_id, self.plan.experiment(trial.params))
        except ConfigError:  # values that exclude each other: the trial has failed, and there is no run
            settings = {k: value for k, value in decided(self.plan.data, trial.params).items() if k != "tracking"}
            return RunHeader(name, {"fedfleet.run_id": run_id}, redacted_data(settings))
        return header_of(run_spec, name, trial_folder(self.folder, trial.number))

    def _end(self, trial: Trial, whole: bool) -> None:
        """whole: whether the trial is from an earlier part of the search, which may not have written all of it."""
        key, objectives = str(trial.number), dict(zip(self.plan.settings.objectives, trial.values, strict=False))
        records: tuple[tuple[str, Record], ...] = ()
        if objectives:
            own = {f"objective/{name}": value for name, value in objectives.items()}
            records = ((key, {"round": 0, **own}), (TOP, {"round": trial.number, **objectives}))
        place, finished = trial_folder(self.folder, trial.number), trial.status == "finished"
        folder = place if whole or finished else None
        model = kept_model(place, lambda: self.plan.experiment(trial.params)) if finished else None
        self.write(End(key, trial.status, trial.reason, folder, whole, whole, records, model=model))

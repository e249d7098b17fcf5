"""What observes the trials of a search: progress on standard error, and its trackers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from textwrap import shorten
from typing import Any

from ...engine.config.registry import find_plugin
from ...engine.config.schema import Tracking
from ...engine.errors import ConfigError
from ...engine.rounds.driver import Record
from ...engine.run_spec import RunSpec
from ...engine.storage.secrets import redacted_data
from ..progress import ProgressOfRuns
from ..ranges import decided
from ..tracking.many_runs import TrackerOfRuns
from ..tracking.model import kept_model
from ..tracking.origin import origin
from ..tracking.run_header import header_of
from ..tracking.writer import TOP, End, RunHeader
from ..units import setting, shown
from .folder import trial_folder
from .plan import SearchPlan
from .trial_store import Trial

LONGEST_NAME = 120
"""The largest number of characters in the name of a trial: it is also the name of files."""


class SearchProgress(ProgressOfRuns[Trial]):
    """The progress of a search; the best trial is that of the first objective."""

    def __init__(self, plan: SearchPlan) -> None:
        self.objectives = plan.settings.objectives
        metric, mode = next(iter(self.objectives.items()))
        super().__init__(metric, mode == "max")

    def label(self, run: Trial) -> str:
        return f"trial {run.number}"

    def value(self, run: Trial) -> float:
        return run.values[0] if run.values else math.nan

    def lines(self, run: Trial) -> tuple[str, str]:
        outcome = f"{run.status}: {run.reason}" if run.reason else run.status
        if run.values:
            named = zip(self.objectives, run.values, strict=True)
            outcome = ", ".join(f"{name} {shown(name, value)}" for name, value in named)
        params = ", ".join(f"{key} {setting(value)}" for key, value in run.params.items())
        line = f"{self.label(run)}: {outcome}, {run.rounds} rounds, {params}"
        return line, f"; {self.done} of {self.total} done, {self.state()}"


def name_of(trial: Trial) -> str:
    """How trackers call a trial: its number, and the settings in which trials differ."""
    settings = ", ".join(f"{key.removeprefix('method.')} {setting(value)}" for key, value in trial.params.items())
    return shorten(f"{trial.key} {settings}", LONGEST_NAME, placeholder=" …")


class SearchTracker(TrackerOfRuns[Trial]):
    """Writes a search to its trackers: a run for the search and one for each trial, metrics with step = round."""

    what = "search"
    child_tag = "fedfleet.trial"
    files = ("best.yaml", "result.json", "report.html")

    def __init__(self, plan: SearchPlan, tracking: Tracking, folder: Path, search_id: str) -> None:
        self.plan, self.search_id = plan, search_id
        super().__init__(tracking, tracking.experiment, folder, tracking.system)

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
        self.begin(str(run.number), lambda: self._header_of(run))

    def run_rounds(self, run: Trial, rows: list[Record]) -> None:
        self.has_content = self.has_content or bool(rows)
        for writer in self.writers:
            writer.rounds(str(run.number), rows)

    def run_ends(self, run: Trial) -> None:
        self._end(run, whole=False)

    def _header_of(self, trial: Trial) -> RunHeader:
        """The header of a trial's run."""
        run_id = f"{self.search_id}-{trial.key}"
        try:
            run_spec = RunSpec.of(run_id, self.plan.experiment(trial.params))
        except ConfigError:  # values that exclude each other: the trial has failed, and there is no run
            settings = {k: value for k, value in decided(self.plan.data, trial.params).items() if k != "tracking"}
            return RunHeader(name_of(trial), {"fedfleet.run_id": run_id}, redacted_data(settings))
        return header_of(run_spec, name_of(trial), trial_folder(self.folder, trial.number))

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

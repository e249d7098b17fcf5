"""The source of a search: hands out trials that Optuna proposes, and decides from their reports which end early."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...engine.config.schema import Experiment
from ...engine.errors import ConfigError, nearest
from ...engine.rounds.driver import Record
from ..executor.source import DIED, Report, RunRequest, Source
from .folder import trial_folder
from .plan import TOTALS, Plan
from .trial_store import Proposal, Trial, TrialStore


class SearchObserver:
    """Receives the events of a search, for progress and MLflow. Its methods do nothing."""

    def begins(self, trials: list[Trial]) -> None:
        """The search begins or is resumed. trials: those of earlier parts of the search."""

    def trial_begins(self, number: int, params: dict[str, Any], experiment: Experiment | None) -> None:
        """A trial begins. params: its values by dotted key. experiment: with these values; None if they exclude each
        other, and then the trial ends at once."""

    def trial_rounds(self, number: int, rows: list[Record]) -> None:
        """Rounds of a trial are over. rows: their records."""

    def trial_ends(self, trial: Trial) -> None:
        """A trial has ended."""

    def ends(self, status: str) -> None:
        """The search has ended. status: finished, failed or killed."""


@dataclass
class Live:
    """A trial that is running. `rows`: the records of its rounds so far."""

    experiment: Experiment
    rows: list[Record] = field(default_factory=list)


def add_record(rows: list[Record], row: Record) -> None:
    """Add a record to those of a run. A round that is repeated after the death of a process replaces its first
    record."""
    while rows and rows[-1]["round"] >= row["round"]:
        rows.pop()
    rows.append(row)


class TrialSource(Source):
    """Connects the executor with Optuna's storage and the observers."""

    def __init__(
        self, plan: Plan, store: TrialStore, folder: Path, search_id: str, observers: list[SearchObserver]
    ) -> None:
        self.plan, self.store, self.folder, self.search_id = plan, store, folder, search_id
        self.observers = observers
        self.live: dict[int, Live] = {}
        self.broken: ConfigError | None = None  # an error that every trial would have
        self.columns = tuple(name for name in plan.settings.objectives if name not in TOTALS)

    def next(self) -> RunRequest | None:
        while (proposal := self.store.propose()) is not None:
            try:
                made = self.plan.experiment(proposal.values)
            except ConfigError as error:  # each value is possible, but not beside the others
                self._begins(proposal, None)
                self._record_end(proposal.number, "failed", [], (), " ".join(str(error).split()))
                continue
            self.live[proposal.number] = Live(made)
            self._begins(proposal, made)
            return self._request(proposal, made)
        return None

    def _begins(self, proposal: Proposal, made: Experiment | None) -> None:
        for observer in self.observers:
            observer.trial_begins(proposal.number, proposal.values, made)

    def _request(self, proposal: Proposal, made: Experiment) -> RunRequest:
        number = proposal.number
        return RunRequest(
            f"{number:04d}",
            inner(made, self.plan.settings.workers).plain(),
            str(trial_folder(self.folder, number)),
            f"{self.search_id}-{number:04d}",
            self.columns,
            self.plan.settings.keep_models,
            may_end=self.plan.settings.pruner != "none",
        )

    @property
    def left(self) -> int:
        return self.store.left

    def on_report(self, key: str, report: Report) -> bool:
        number, rows, lags = int(key), report.rows, False
        live = self.live.get(number)
        if live is None:
            return True
        for row in rows:
            add_record(live.rows, row)
            lags = self._reported(number, live, row) or lags
        for observer in self.observers:
            observer.trial_rounds(number, rows)
        if report.status == "running":
            if lags:
                self._end(number, "pruned")
            return lags
        self._end(number, report.status, report.reason)
        return True

    def on_process_death(self, key: str) -> None:
        if int(key) in self.live:
            self._end(int(key), "failed", DIED)

    def _reported(self, number: int, live: Live, row: Record) -> bool:
        """Record a round with an objective's value; returns whether the pruner ends the trial."""
        if len(self.plan.settings.objectives) > 1 or not all(column in row for column in self.columns):
            return False
        prune = self.store.report(number, int(row["round"]), self._values(live)[0])
        return prune and row["round"] < live.experiment.federation.rounds

    def _values(self, live: Live) -> list[float]:
        """The values of the objectives over the rounds so far."""
        return [value_of(name, live.rows, self.plan.settings.last) for name in self.plan.settings.objectives]

    def _end(self, number: int, status: str, reason: str = "") -> None:
        live = self.live.pop(number)
        values: list[float] = []
        if status == "finished":
            try:
                values = self._values(live)
            except ConfigError as error:
                self.broken, status, reason = error, "failed", str(error)
            else:
                if not all(math.isfinite(value) for value in values):
                    status, reason = "failed", f"an objective is not finite: {values}"
        self._record_end(number, status, live.rows, values, reason)

    def _record_end(
        self, number: int, status: str, rows: list[Record], values: Sequence[float] = (), reason: str = ""
    ) -> None:
        """Record how a trial has ended, and tell the observers. rows: the records of its rounds."""
        facts = {"rounds": len(rows), "seconds": total("seconds", rows), "bytes": total("bytes", rows)}
        self.store.end(number, status, list(values), {**facts, "reason": reason} if reason else facts)
        ended = self.store.trial(number)
        for observer in self.observers:
            observer.trial_ends(ended)


def inner(made: Experiment, workers: int) -> Experiment:
    """The experiment as a trial runs it: in its own process or on its own workers, and without MLflow."""
    where = {"backend": "ray", "workers": workers} if workers else {"backend": "local"}
    updates: dict[str, Any] = {"engine": made.engine.model_copy(update=where)}
    if made.tracking.name == "mlflow":
        updates["tracking"] = made.tracking.model_copy(update={"uri": "none"})
    return made.model_copy(update=updates)


def value_of(name: str, rows: list[Record], last: int) -> float:
    """An objective's value over a run: a total, or the mean of the last values of a column. Raises ConfigError."""
    if name in TOTALS:
        return total(name, rows)
    found = [row[name] for row in rows if name in row]
    if not found:
        columns = [*TOTALS, *sorted({column for row in rows for column in row if column != "round"})]
        raise ConfigError(f"search.objectives: no round has {name}; {nearest(name, columns)}")
    return sum(found[-last:]) / len(found[-last:])


def total(name: str, rows: list[Record]) -> float:
    """Seconds or bytes of a run; see TOTALS."""
    if name == "seconds":
        return float(sum(row["time/seconds"] for row in rows))
    return float(sum(row["comm/bytes_down"] + row["comm/bytes_up"] for row in rows))

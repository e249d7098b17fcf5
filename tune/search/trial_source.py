"""The source of a search: hands out trials that Optuna proposes, and decides from their reports which end early."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...engine.config.schema import Experiment
from ...engine.errors import ConfigError
from ...engine.records.metrics import nearest_column
from ...engine.rounds.driver import Record
from ..executor.source import RunRequest, RunsObserver, Source
from ..tracking.writers import WRITERS
from .folder import trial_folder
from .plan import TOTALS, SearchPlan
from .trial_store import Trial, TrialStore


def add_record(rows: list[Record], row: Record) -> None:
    """Add a record to those of a run. A round that is repeated after the death of a process replaces its first
    record."""
    while rows and rows[-1]["round"] >= row["round"]:
        rows.pop()
    rows.append(row)


class TrialSource(Source[Trial]):
    """Connects the executor with Optuna's storage and the observers."""

    def __init__(
        self,
        plan: SearchPlan,
        store: TrialStore,
        folder: Path,
        search_id: str,
        observers: Sequence[RunsObserver[Trial]],
        at_once: int | None = None,
    ) -> None:
        """at_once: the largest number of trials under way; None: as many as the executor takes."""
        super().__init__(observers)
        self.at_once = at_once
        self.plan, self.store, self.folder, self.search_id = plan, store, folder, search_id
        self.records: dict[int, list[Record]] = {}  # of the rounds of the trials under way
        self.rounds: dict[int, int] = {}  # that the trials under way are to have
        self.broken: ConfigError | None = None  # an error that every trial would have
        self.columns = tuple(name for name in plan.settings.objectives if name not in TOTALS)

    def next(self) -> RunRequest | None:
        if self.at_once is not None and len(self.live) >= self.at_once:
            return None
        while (trial := self.store.propose()) is not None:
            self.records[trial.number] = []
            try:
                made = self.plan.experiment(trial.params)
            except ConfigError as error:  # each value is possible, but not beside the others
                self.begin(trial, 0)
                self.end(trial, "failed", " ".join(str(error).split()))
                continue
            self.rounds[trial.number] = made.federation.rounds
            self.begin(trial, made.federation.rounds)
            return RunRequest(
                trial.key,
                inner(made, self.plan.settings.workers).plain(),
                str(trial_folder(self.folder, trial.number)),
                f"{self.search_id}-{trial.key}",
                self.columns,
                self.plan.settings.keep_models,
                may_end=self.plan.settings.pruner != "none",
            )
        return None

    @property
    def left(self) -> int:
        return self.store.left

    def reported(self, run: Trial, rows: list[Record]) -> bool:
        """Record the objective's value after each round; returns whether the pruner ends the trial."""
        records, lags = self.records[run.number], False
        for row in rows:
            add_record(records, row)
            if len(self.plan.settings.objectives) == 1 and all(column in row for column in self.columns):
                prune = self.store.report(run.number, int(row["round"]), self._values(run)[0])
                lags = lags or (prune and row["round"] < self.rounds[run.number])
        return lags

    def _values(self, run: Trial) -> list[float]:
        """The values of the objectives over the rounds so far."""
        records, last = self.records[run.number], self.plan.settings.last
        return [value_of(name, records, last) for name in self.plan.settings.objectives]

    def record_end(self, run: Trial, status: str, reason: str) -> Trial:
        values: list[float] = []
        if status == "finished":
            try:
                values = self._values(run)
            except ConfigError as error:
                self.broken, status, reason = error, "failed", str(error)
            else:
                if not all(math.isfinite(value) for value in values):
                    status, reason = "failed", f"an objective is not finite: {values}"
        rows = self.records.pop(run.number)
        facts = {"rounds": len(rows), "seconds": total("seconds", rows), "bytes": total("bytes", rows)}
        self.store.end(run.number, status, values, {**facts, "reason": reason} if reason else facts)
        return self.store.trial(run.number)


def inner(made: Experiment, workers: int) -> Experiment:
    """The experiment as a trial runs it: in its own process or on its own workers, and without the trackers that get
    the whole search."""
    where = {"backend": "ray", "workers": workers} if workers else {"backend": "local"}
    updates: dict[str, Any] = {"engine": made.engine.model_copy(update=where)}
    own = tuple(name for name in made.tracking.names if name not in WRITERS)  # of plug-ins
    updates["tracking"] = made.tracking.model_copy(update={"name": own} if own else {"uri": "none"})
    return made.model_copy(update=updates)


def value_of(name: str, rows: list[Record], last: int) -> float:
    """An objective's value over a run: a total, or the mean of the last values of a column. Raises ConfigError."""
    if name in TOTALS:
        return total(name, rows)
    found = [row[name] for row in rows if name in row]
    if not found:
        columns = [*TOTALS, *sorted({column for row in rows for column in row if column != "round"})]
        raise ConfigError(f"search.objectives: no round has {name}; {nearest_column(name, columns)}")
    return sum(found[-last:]) / len(found[-last:])


def total(name: str, rows: list[Record]) -> float:
    """Seconds or bytes of a run; see TOTALS."""
    if name == "seconds":
        return float(sum(row["time/seconds"] for row in rows))
    return float(sum(row["comm/bytes_down"] + row["comm/bytes_up"] for row in rows))

"""Between the executor and Optuna: hands out trials, hears their reports, decides which end early."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...engine.config.schema import Experiment
from ...engine.errors import ConfigError, nearest
from ...engine.rounds.driver import Record
from ..executor.source import DIED, Report, RunRequest, Source
from .ledger import Ledger, Trial
from .plan import TOTALS, Plan


class Watcher:
    """Told of a search: progress, MLflow."""

    def begins(self, trials: list[Trial]) -> None:
        """trials: of earlier parts of the search."""

    def trial_begins(self, number: int, params: dict[str, Any], experiment: Experiment) -> None:
        """A trial is about to start."""

    def trial_rounds(self, number: int, rows: list[Record]) -> None:
        """A trial has reported rounds."""

    def trial_ends(self, trial: Trial) -> None:
        """A trial is over."""

    def ends(self, status: str) -> None:
        """status: finished, failed or killed."""


@dataclass
class Live:
    """A trial that is running. `rows`: its record so far."""

    experiment: Experiment
    rows: list[Record] = field(default_factory=list)

    def add(self, row: Record) -> None:
        """A round told again, after a process died, replaces what was told."""
        while self.rows and self.rows[-1]["round"] >= row["round"]:
            self.rows.pop()
        self.rows.append(row)


class Conductor(Source):
    def __init__(self, plan: Plan, ledger: Ledger, folder: Path, search_id: str, watchers: list[Watcher]) -> None:
        self.plan, self.ledger, self.folder, self.search_id = plan, ledger, folder, search_id
        self.watchers = watchers
        self.live: dict[int, Live] = {}
        self.broken: ConfigError | None = None  # a mistake that every trial would make
        self.columns = tuple(name for name in plan.settings.objectives if name not in TOTALS)

    def next(self) -> RunRequest | None:
        proposal = self.ledger.propose()
        if proposal is None:
            return None
        number = proposal.number
        made = self.plan.experiment(proposal.values)
        self.live[number] = Live(made)
        for watcher in self.watchers:
            watcher.trial_begins(number, proposal.values, made)
        return RunRequest(
            f"{number:04d}",
            inner(made, self.plan.settings.workers).plain(),
            str(trial_folder(self.folder, number)),
            f"{self.search_id}-{number:04d}",
            self.columns,
            self.plan.settings.keep_models,
        )

    def hear(self, key: str, report: Report) -> bool:
        number, rows, lags = int(key), report.rows, False
        live = self.live.get(number)
        if live is None:
            return True
        for row in rows:
            live.add(row)
            lags = self._reported(number, live, row) or lags
        for watcher in self.watchers:
            watcher.trial_rounds(number, rows)
        if report.status == "running":
            if lags:
                self._end(number, "pruned")
            return lags
        self._end(number, report.status, report.reason)
        return True

    def died(self, key: str) -> None:
        if int(key) in self.live:
            self._end(int(key), "failed", DIED)

    def _reported(self, number: int, live: Live, row: Record) -> bool:
        """Record an evaluated round; whether the trial lags behind."""
        if len(self.plan.settings.objectives) > 1 or not all(column in row for column in self.columns):
            return False
        prune = self.ledger.report(number, int(row["round"]), self._values(live)[0])
        return prune and row["round"] < live.experiment.federation.rounds

    def _values(self, live: Live) -> list[float]:
        """Of the objectives, over the rounds so far."""
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
                    status, reason = "failed", f"an objective is not a number: {values}"
        facts = {"rounds": len(live.rows), "seconds": total("seconds", live.rows), "bytes": total("bytes", live.rows)}
        self.ledger.end(number, status, values, {**facts, "reason": reason} if reason else facts)
        (ended,) = [trial for trial in self.ledger.trials() if trial.number == number]
        for watcher in self.watchers:
            watcher.trial_ends(ended)


def trial_folder(search: Path, number: int) -> Path:
    return search / "trials" / f"{number:04d}"


def inner(made: Experiment, workers: int) -> Experiment:
    """The experiment as a trial runs it: in its own process or on workers of its own, MLflow left to the search."""
    where = {"backend": "ray", "workers": workers} if workers else {"backend": "local"}
    updates: dict[str, Any] = {"engine": made.engine.model_copy(update=where)}
    if made.tracking.name == "mlflow":
        updates["tracking"] = made.tracking.model_copy(update={"uri": "none"})
    return made.model_copy(update=updates)


def value_of(name: str, rows: list[Record], last: int) -> float:
    """An objective over a run's record: a total, or the mean of a column's last values."""
    if name in TOTALS:
        return total(name, rows)
    found = [row[name] for row in rows if name in row]
    if not found:
        columns = [*TOTALS, *sorted({column for row in rows for column in row if column != "round"})]
        raise ConfigError(f"search.objectives: no round has {name}; {nearest(name, columns)}")
    return sum(found[-last:]) / len(found[-last:])


def total(name: str, rows: list[Record]) -> float:
    if name == "seconds":
        return float(sum(row["time/seconds"] for row in rows))
    return float(sum(row["comm/bytes_down"] + row["comm/bytes_up"] for row in rows))

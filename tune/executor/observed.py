"""A source whose observers hear of every run: the common part of searches, whose runs are trials, and of studies, whose
runs are cells."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, TypeVar

from ...engine.errors import Interrupted
from ...engine.records.history import Record
from .source import DIED, RunReport, Source

Run = TypeVar("Run")
"""A trial of a search, or a cell of a study."""


class RunsObserver(Generic[Run]):
    """Receives the events of the runs of a search or a study, for progress and MLflow. Its methods do nothing."""

    def begins(self, what: str, total: int, ended: Sequence[Run]) -> None:
        """Runs begin. what: trial, cell or fork; total: their number; ended: those of them that have ended before."""

    def run_begins(self, run: Run, rounds: int) -> None:
        """A run begins. rounds: its number of rounds."""

    def run_rounds(self, run: Run, rows: list[Record]) -> None:
        """Rounds of a run are over. rows: their records."""

    def run_ends(self, run: Run) -> None:
        """A run has ended."""

    def pauses(self) -> None:
        """No run is under way. Others may follow, also some that have observers of their own."""

    def ends(self, status: str) -> None:
        """All has ended. status: finished, failed or killed."""


class ObservedSource(Source, Generic[Run]):
    """A source that knows the runs under way, and tells its observers of them."""

    def __init__(self, observers: Sequence[RunsObserver[Run]]) -> None:
        self.observers = observers
        self.live: dict[str, Run] = {}

    @abstractmethod
    def reported(self, run: Run, rows: list[Record]) -> bool:
        """Rounds of a run are over; returns whether it ends here. rows: their records."""

    @abstractmethod
    def record_end(self, run: Run, status: str, reason: str) -> Run:
        """Record how a run has ended; returns the run as it is then. status: finished, pruned, diverged or failed."""

    def begin(self, key: str, run: Run, rounds: int) -> None:
        """A run begins."""
        self.live[key] = run
        for observer in self.observers:
            observer.run_begins(run, rounds)

    def end(self, key: str, status: str, reason: str = "") -> None:
        """A run has ended."""
        run = self.record_end(self.live.pop(key), status, reason)
        for observer in self.observers:
            observer.run_ends(run)

    def on_report(self, key: str, report: RunReport) -> bool:
        run = self.live.get(key)
        if run is None:
            return True
        lags = self.reported(run, report.rows)
        for observer in self.observers:
            observer.run_rounds(run, report.rows)
        if report.status != "running":
            self.end(key, report.status, report.reason)
        elif lags:
            self.end(key, "pruned")
        return lags or report.status != "running"

    def on_process_death(self, key: str) -> None:
        if key in self.live:
            self.end(key, "failed", DIED)


@contextmanager
def observed(observers: Sequence[RunsObserver[Run]]) -> Iterator[None]:
    """Tell the observers at the end of this context how it ended."""
    status = "failed"
    try:
        yield
        status = "finished"
    except (Interrupted, KeyboardInterrupt):
        status = "killed"
        raise
    finally:
        for observer in observers:
            observer.ends(status)

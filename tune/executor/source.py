"""The interfaces between what hands out runs (a search or a study), what executes them and what observes them."""

from __future__ import annotations

import json
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from ...engine.errors import Interrupted
from ...engine.planning.execution_plan import without_numbers
from ...engine.records.history import Record

HEARTBEAT_SECONDS = 0.5
"""The longest time until a process answers the driver, and the time between reports of a run without columns."""


class RunRequest(NamedTuple):
    """A run to execute.

    key: name of the run, unique in its source. experiment: plain data of the experiment. folder: for the run's files,
    on a file system that all nodes share. run_id: a new id if None. columns: the run reports after each round whose
    record has all of these columns, and then waits for the source's answer; if None, it reports about twice a second
    and does not wait. keep_model: whether the final model stays in the folder. may_end: whether an answer may end the
    run; if not, a run that shares its process with others does not wait for answers.
    """

    key: str
    experiment: dict[str, Any]
    folder: str
    run_id: str | None = None
    columns: tuple[str, ...] | None = None
    keep_model: bool = False
    may_end: bool = True

    @property
    def kind(self) -> str:
        """What runs have in common of which as many fit into a process: they differ in numbers of the method, in the
        partition and in the seed."""
        data = self.experiment
        workload, federation = data.get("workload"), data.get("federation", {})
        if isinstance(workload, dict):
            workload = {key: value for key, value in workload.items() if key != "partition"}
        sizes = [federation.get("cohort"), federation.get("local"), data.get("engine")]
        return json.dumps([without_numbers(data.get("method")), workload, sizes], sort_keys=True, default=repr)


class RunReport(NamedTuple):
    """What a run reports.

    rows: the records since the last report. status: running, finished, diverged or failed. reason: a sentence on why
    the run failed or diverged, else "".
    """

    rows: list[Record]
    status: str
    reason: str


class Keyed(Protocol):
    """What has a name that is unique among the runs of its source."""

    @property
    def key(self) -> str: ...


Run = TypeVar("Run", bound=Keyed)
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


class Source(ABC, Generic[Run]):
    """Hands out runs, receives their reports, and tells its observers of them. The executor calls all methods in the
    main thread of the driver."""

    def __init__(self, observers: Sequence[RunsObserver[Run]] = ()) -> None:
        self.observers = observers
        self.live: dict[str, Run] = {}  # the runs under way

    @abstractmethod
    def next(self) -> RunRequest | None:
        """The next run, of which `begin` has been told, or None if there is none now: more may follow when another run
        has ended."""

    @property
    @abstractmethod
    def left(self) -> int:
        """About how many runs are still to be handed out, so that processes get equal shares of them."""

    @abstractmethod
    def reported(self, run: Run, rows: list[Record]) -> bool:
        """Rounds of a run are over; returns whether it ends here. rows: their records."""

    @abstractmethod
    def record_end(self, run: Run, status: str, reason: str) -> Run:
        """Record how a run has ended; returns the run as it is then. status: finished, pruned, diverged or failed."""

    def begin(self, run: Run, rounds: int) -> None:
        """A run begins."""
        self.live[run.key] = run
        for observer in self.observers:
            observer.run_begins(run, rounds)

    def end(self, run: Run, status: str, reason: str = "") -> None:
        """A run has ended."""
        del self.live[run.key]
        run = self.record_end(run, status, reason)
        for observer in self.observers:
            observer.run_ends(run)

    def on_report(self, key: str, report: RunReport) -> bool:
        """A run has reported; returns whether to end it. The status of a run's last report is not `running`."""
        run = self.live.get(key)
        if run is None:
            return True
        lags = self.reported(run, report.rows)
        for observer in self.observers:
            observer.run_rounds(run, report.rows)
        if report.status != "running":
            self.end(run, report.status, report.reason)
        elif lags:
            self.end(run, "pruned")
        return lags or report.status != "running"

    def on_process_death(self, key: str) -> None:
        """The process of a run died, and so did the process that tried the run again. No report follows."""
        if key in self.live:
            self.end(self.live[key], "failed", "the run's process died, twice; it may have run out of memory")


Itself = TypeVar("Itself", bound="Executor")


class Executor:
    """Executes the runs that sources hand out. A context manager, which ends what it has started."""

    def __enter__(self: Itself) -> Itself:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def load(self, experiment: dict[str, Any]) -> None:
        """Get ready for runs with the data of an experiment, while the driver prepares these runs. experiment: plain
        data."""

    def start(self, stop: Callable[[], Any]) -> None:
        """Get ready for runs; `run` does it otherwise. Raises ConfigError if that is impossible, or if a run could
        never be placed, and Interrupted if `stop` returns a signal meanwhile."""

    def run(self, source: Source[Any], stop: Callable[[], Any]) -> None:
        """Execute runs until the source has none left or `stop` returns something true: then no further run begins, and
        those under way write a checkpoint and end. Returns when no run is under way."""
        raise NotImplementedError

    def close(self) -> None:
        """End what was started, after the runs under way have written checkpoints."""
        raise NotImplementedError


def remove_resume_files(folder: Path) -> None:
    """Remove the states and checkpoints of a run that has ended. Its own process may have been killed before that."""
    for name in ("state", "checkpoints"):
        shutil.rmtree(folder / name, ignore_errors=True)

"""Progress on standard error: a line that is updated on a terminal; elsewhere, as in the log of a batch job, a line now
and then."""

from __future__ import annotations

import math
import sys
import time
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

from ..engine.config.schema import Asynchronous
from ..engine.records.event_log import PLAN, STILL
from ..engine.rounds.driver import Record
from ..engine.run_spec import RunSpec
from ..engine.runs.observer import Observer, Watching
from ..engine.runs.result import Result
from .executor.source import Run, RunsObserver
from .streams import tell
from .units import duration, shown

SHORTEST, LONGEST = 10.0, 60.0
"""Seconds between two lines of a log: at the beginning of a command, and after ten minutes."""

NAMED = 8
"""The most runs under way that are named. A search may have thousands."""

SHOWN = ("loss", "accuracy", "clients/s")


class LiveLine:
    """A line that counts what has ended. On a terminal it is updated. In a log it is printed after a tenth of the time
    since the beginning, but at least after SHORTEST and at most after LONGEST seconds: a short command prints none, and
    the log of a day has about 1,500."""

    def __init__(self) -> None:
        self.bar: Any = None  # of rich, on a terminal
        self.began: float = time.monotonic()
        self.last: float = self.began

    def start(self, what: str, total: int, done: int = 0, remaining: bool = False) -> None:
        """Begin to count. what: name of one of the `total` things that are counted, of which `done` are over.
        remaining: whether to show the remaining time, which is estimated from what has ended."""
        if not sys.stderr.isatty():
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = [TextColumn(what), MofNCompleteColumn(), BarColumn(20), TextColumn("{task.description}")]
        if remaining:
            columns.append(TimeRemainingColumn())
        self.bar = Progress(*columns, console=Console(stderr=True))
        self.bar.start()
        self.bar.add_task("starting", total=total, completed=done)

    def due(self) -> bool:
        """Whether to show the state now: always on a terminal; the next line of a log is then due later."""
        now = time.monotonic()
        if self.bar is None and now - self.last < min(LONGEST, max(SHORTEST, (now - self.began) / 10)):
            return False
        self.last = now
        return True

    def update(self, done: float, live: str, log: str) -> None:
        """Show the state. live: what a terminal shows beside the count; log: the whole line of a log."""
        if self.bar is not None:
            self.bar.update(self.bar.task_ids[0], completed=done, description=live)
        else:
            tell(log)

    def say(self, line: str, detail: str = "") -> None:
        """Print a line above the live one. detail: the end of the line, left out if the live line shows the same."""
        if self.bar is not None:
            self.bar.console.print(line, highlight=False, markup=False)
        else:
            tell(line + detail)

    def close(self) -> None:
        """Leave the line as it is."""
        if self.bar is not None:
            self.bar.stop()
            self.bar = None


class ProgressOfRuns(LiveLine, RunsObserver[Run]):
    """An observer of a search or a study. It prints a line for each run that ends, and its live line has the runs under
    way, the best one and the remaining time."""

    def __init__(self, metric: str, largest: bool) -> None:
        """metric: by which runs are ranked. largest: whether its largest value is the best one."""
        super().__init__()
        self.metric, self.largest = metric, largest
        self.best: tuple[float, str] | None = None  # value and label of the best run

    @abstractmethod
    def label(self, run: Run) -> str:
        """How a run is called."""

    @abstractmethod
    def value(self, run: Run) -> float:
        """The metric of a run that has ended; nan if there is none."""

    @abstractmethod
    def lines(self, run: Run) -> tuple[str, str]:
        """The line of a run that has ended, and its end, which is left out if the live line shows the same."""

    def begins(self, what: str, total: int, ended: Sequence[Run]) -> None:
        self.close()
        self.what, self.total, self.done, self.earlier = what, total, len(ended), len(ended)
        self.shares: dict[str, tuple[str, float]] = {}  # run under way -> label, share of its rounds that is done
        self.rounds: dict[str, int] = {}
        self.since = time.monotonic()
        for run in ended:
            self._rank(run)
        self.start(what, total, self.done)
        if self.bar is None:  # a reader of a log shall know at once that something has begun
            self.say(f"{what}s: {self.done} of {total} done, starting")

    def run_begins(self, run: Run, rounds: int) -> None:
        if rounds:  # else it fails before its first one
            self.rounds[run.key] = rounds
            self._advance(run, 0)

    def run_rounds(self, run: Run, rows: list[Record]) -> None:
        if rows:
            self._advance(run, rows[-1]["round"])

    def run_ends(self, run: Run) -> None:
        self.done += 1
        self._rank(run)
        self.shares.pop(run.key, None)
        self._show()
        self.say(*self.lines(run))

    def pauses(self) -> None:
        self.close()

    def ends(self, status: str) -> None:
        self.close()

    def state(self) -> str:
        """Numbers of runs, the best one and the remaining time, as text."""
        left = max(0, self.total - self.done - len(self.shares))
        best = f", best {shown(self.metric, self.best[0])} ({self.best[1]})" if self.best else ""
        return f"{len(self.shares)} running, {left} left{best}{self._time_left()}"

    def _rank(self, run: Run) -> None:
        value, sign = self.value(run), 1 if self.largest else -1
        if not math.isnan(value) and (self.best is None or sign * value > sign * self.best[0]):
            self.best = value, self.label(run)

    def _advance(self, run: Run, done: float) -> None:
        self.shares[run.key] = self.label(run), done / self.rounds[run.key]
        self._show()

    def _time_left(self) -> str:
        """The remaining time, from the time that the ended runs and the finished parts of the others have taken."""
        made = self.done - self.earlier + sum(share for _, share in self.shares.values())
        left = self.total - self.earlier - made
        return f", about {duration((time.monotonic() - self.since) / made * left)}" if made > 0 and left > 0 else ""

    def _under_way(self) -> str:
        """The first runs under way, each with the share of its rounds that is done."""
        first = "  ".join(f"{label} {share:.0%}" for label, share in islice(self.shares.values(), NAMED))
        more = len(self.shares) - NAMED
        return f"{first}  and {more} more" if more > 0 else first

    def _show(self) -> None:
        if (self.bar is not None or self.shares) and self.due():
            state, runs = self.state(), self._under_way()
            self.update(self.done, f"{state}\n{runs}", f"{self.done} of {self.total} done, {state}: {runs}")


class Progress(Observer):
    """An observer that updates a line on a terminal or below the cell of a notebook: the round, loss, accuracy and
    clients per second.

    Elsewhere, as in the log of a batch job, it prints a line to standard error after the first ten seconds, and then at
    growing intervals of at most a minute.
    """

    def __init__(self) -> None:
        self.line: LiveLine = LiveLine()
        self.cell: Any = None  # IPython's handle of the line in a notebook
        self.rounds: int = 0
        self.shown: dict[str, str] = {}

    def begin(self, run_spec: RunSpec) -> None:
        self.rounds = run_spec.last_round
        if in_notebook():
            from IPython.display import display

            self.cell = display({"text/plain": "starting"}, raw=True, display_id=True)
        self.line.start("round", self.rounds, remaining=True)

    def record(self, record: Record) -> None:
        if "train/loss" in record:
            self.shown["loss"] = f"{record['train/loss']:.4f}"
        for name in ("eval/accuracy", "eval/own/test_accuracy"):
            if name in record:
                self.shown["accuracy"] = f"{record[name]:.2%}"
                break
        if speed := record["client/count"] / record["time/seconds"]:  # else nobody trained in this round
            self.shown["clients/s"] = f"{speed:.0f}" if speed >= 10 else f"{speed:.2g}"
        text = "  ".join(f"{name} {self.shown[name]}" for name in SHOWN if name in self.shown)
        line = f"round {record['round']:.0f} of {self.rounds}  {text}"
        if self.cell is not None:
            self.cell.update({"text/plain": line}, raw=True)
        elif self.line.due():
            self.line.update(record["round"], text, line)

    def event(self, text: str) -> None:
        if (self.line.bar is not None and not text.startswith(PLAN)) or text.startswith(STILL):
            self.line.say(text.split("\n")[0])

    def end(self, result: Result) -> None:
        self.line.close()

    def failed(self, error: BaseException) -> None:
        self.line.close()


class ProgressOfCommand(Progress):
    """The same for a command. It prints to standard error what is about to run, before Ray starts and the data are
    read, and when the rounds are over, that the tracker writes, which may take longer than the rounds."""

    def __init__(self, tracks: bool = True) -> None:
        """tracks: whether a tracker of this process writes."""
        super().__init__()
        self.tracks = tracks

    def begin(self, run_spec: RunSpec) -> None:
        tell(described(run_spec))
        super().begin(run_spec)

    def end(self, result: Result) -> None:
        super().end(result)
        names = result.experiment.tracking.names
        if self.tracks and names:
            tell(f"writing the run to {' and '.join(names)}")


def described(run_spec: RunSpec) -> str:
    """A run in one line: the method, the workload, the clients, the rounds, where they are computed, and the folder."""
    federation = run_spec.experiment.federation
    pace, cohort, rounds = federation.pace, federation.cohort, f"{run_spec.last_round} rounds"
    if isinstance(pace, Asynchronous):
        sampled = f"{cohort} at a time" if pace.starts == "slots" else f"one every {pace.gap:g} s"
        rounds = f"{run_spec.last_round} updates"
    else:
        sampled = f"cohorts of {'' if federation.largest_cohort == cohort else 'about '}{cohort}"
    parts = [f"{federation.clients} clients", sampled, rounds, place_of(run_spec)]
    if run_spec.directory is not None:
        parts.append(f"{'from the last checkpoint ' if run_spec.resume else ''}in {run_spec.directory}")
    return f"{run_spec.experiment.title}: {', '.join(parts)}"


def place_of(run_spec: RunSpec) -> str:
    """Where a run is computed, as in "2 workers on Ray", and why. On a cluster, `engine.workers: auto` is known only
    later."""
    engine, (backend, reason) = run_spec.experiment.engine, run_spec.backend
    why = f" ({reason})" if reason else ""
    if backend == "local":
        return f"in this process{why}"
    if engine.address is not None and engine.workers == "auto":
        return f"on the Ray cluster {engine.address}"
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():  # the workers follow what it has
        from ..engine.backends.ray.connect import counted

        engine = counted(engine)
    count = engine.count_workers()
    workers = f"{count} worker{'s' if count != 1 else ''}"
    return f"{workers} on {'Ray' if engine.address is None else f'the Ray cluster {engine.address}'}{why}"


def with_progress(observers: Iterable[Watching], progress: bool) -> list[Watching]:
    """The observers of a run that Python starts, and one that shows its progress, unless they have one. progress:
    False for none."""
    given = list(observers)
    return [*given, Progress()] if progress and not any(isinstance(each, Progress) for each in given) else given


def observers(quiet: bool, tracks: bool = True) -> list[Observer]:
    """The observers of a command that runs an experiment. quiet: whether to show no progress. tracks: whether a tracker
    of this process writes."""
    return [] if quiet else [ProgressOfCommand(tracks)]


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None

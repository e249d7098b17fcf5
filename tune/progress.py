"""Progress on standard error: a line that is updated on a terminal; elsewhere, as in the log of a batch job, a line now
and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Hashable
from itertools import islice
from typing import Any

from ..engine.config.schema import Asynchronous
from ..engine.records.event_log import STILL
from ..engine.rounds.driver import Record
from ..engine.run_spec import RunSpec
from ..engine.runs.observer import Observer
from ..engine.runs.result import Result
from .streams import tell
from .units import duration

SHORTEST, LONGEST = 10.0, 60.0
"""Seconds between two lines of a log: at the beginning of a command, and after ten minutes."""

NAMED = 8
"""The most runs under way that are named. A search may have thousands."""

SHOWN = ("loss", "accuracy", "clients/s")


class Pulse:
    """Says when the next line of a log is due: after a tenth of the time since the beginning, but at least after
    SHORTEST and at most after LONGEST seconds. So a short command prints none, and a log of a day has about 1,500."""

    def __init__(self) -> None:
        self.began: float = time.monotonic()
        self.last: float = self.began

    def due(self) -> bool:
        """Whether a line is due now; the next one is then due later."""
        now = time.monotonic()
        if now - self.last < min(LONGEST, max(SHORTEST, (now - self.began) / 10)):
            return False
        self.last = now
        return True


class LiveLine:
    """A line that counts what has ended. On a terminal it is updated; elsewhere it is printed when `Pulse` says so."""

    def __init__(self, quiet: bool = False) -> None:
        """quiet: whether to print nothing."""
        self.quiet: bool = quiet
        self.bar: Any = None  # of rich, on a terminal
        self.pulse: Pulse = Pulse()

    def start(self, what: str, total: int, done: int = 0, remaining: bool = False) -> None:
        """Begin to count. what: name of one of the `total` things that are counted, of which `done` are over.
        remaining: whether to show the remaining time, which is estimated from what has ended."""
        if self.quiet or not sys.stderr.isatty():
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
        """Whether to show the state now: always on a terminal, else from time to time."""
        return self.bar is not None or (not self.quiet and self.pulse.due())

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
        elif not self.quiet:
            tell(line + detail)

    def close(self) -> None:
        """Leave the line as it is."""
        if self.bar is not None:
            self.bar.stop()
            self.bar = None


class ProgressOfRuns(LiveLine):
    """Counts runs and estimates the remaining time. A subclass names the best run so far in `best_text`."""

    def open(self, what: str, total: int, done: int) -> None:
        """Begin to count. what: name of a run, trial or cell; done: number of the `total` runs that ended before."""
        self.what, self.total, self.done, self.earlier = what, total, done, done
        self.shares: dict[Hashable, tuple[str, float]] = {}  # run under way -> label, share of its rounds that is done
        self.since = time.monotonic()
        self.start(what, total, done)
        if self.bar is None:  # a reader of a log shall know at once that something has begun
            self.say(f"{what}s: {done} of {total} done, starting")

    def advance(self, key: Hashable, label: str, share: float) -> None:
        """A run is under way. share: the part of its rounds that is done."""
        self.shares[key] = (label, share)
        self._show()

    def drop(self, key: Hashable) -> None:
        """A run is no longer under way, and does not count as ended."""
        self.shares.pop(key, None)
        self._show()

    def finish(self, key: Hashable) -> None:
        """A run has ended; the caller prints its line by `say` next."""
        self.done += 1
        self.drop(key)

    def state(self) -> str:
        """Numbers of runs, the best one and the remaining time, as text."""
        left = max(0, self.total - self.done - len(self.shares))
        return f"{len(self.shares)} running, {left} left{self.best_text()}{self._time_left()}"

    def best_text(self) -> str:
        """The best run so far, as text such as ", best 87.6 % (trial 0)", or ""."""
        return ""

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

    def begin(self, run_spec: RunSpec, facts: dict[str, Any]) -> None:
        self.rounds = run_spec.last_round
        if in_notebook():
            from IPython.display import display

            self.cell = display({"text/plain": "starting"}, raw=True, display_id=True)
        self.line.start("round", self.rounds, remaining=True)

    def record(self, record: Record) -> None:
        if "train/loss" in record:
            self.shown["loss"] = f"{record['train/loss']:.4f}"
        if "eval/accuracy" in record:
            self.shown["accuracy"] = f"{record['eval/accuracy']:.2%}"
        self.shown["clients/s"] = f"{record['client/count'] / record['time/seconds']:.0f}"
        text = "  ".join(f"{name} {self.shown[name]}" for name in SHOWN if name in self.shown)
        line = f"round {record['round']:.0f} of {self.rounds}  {text}"
        if self.cell is not None:
            self.cell.update({"text/plain": line}, raw=True)
        elif self.line.due():
            self.line.update(record["round"], text, line)

    def event(self, text: str) -> None:
        if self.line.bar is not None or text.startswith(STILL):
            self.line.say(text.split("\n")[0])

    def end(self, result: Result) -> None:
        self.line.close()

    def failed(self, error: BaseException) -> None:
        self.line.close()


class FirstLine(Observer):
    """An observer that prints to standard error what is about to run, before Ray starts and the data are read."""

    def begin(self, run_spec: RunSpec, facts: dict[str, Any]) -> None:
        tell(described(run_spec))


def described(run_spec: RunSpec) -> str:
    """A run in one line: the method, the workload, the clients, the rounds, where they are computed, and the folder."""
    federation = run_spec.experiment.federation
    pace, cohort, rounds = federation.pace, federation.cohort, f"{run_spec.last_round} rounds"
    if isinstance(pace, Asynchronous):
        sampled = f"{cohort} at a time" if pace.starts == "slots" else f"one every {pace.gap:g} s"
        rounds = f"{run_spec.last_round} updates"
    else:
        sampled = f"cohorts of {cohort}" if federation.sampling == "fixed" else f"cohorts of about {cohort}"
    parts = [f"{federation.clients} clients", sampled, rounds, place_of(run_spec)]
    if run_spec.directory is not None:
        parts.append(f"{'from the last checkpoint ' if run_spec.resume else ''}in {run_spec.directory}")
    return f"{run_spec.experiment.title}: {', '.join(parts)}"


def place_of(run_spec: RunSpec) -> str:
    """Where a run is computed, as in "2 workers on Ray". On a cluster, `engine.workers: auto` is known only later."""
    engine = run_spec.experiment.engine
    if engine.backend != "ray":
        return "in this process"
    if engine.address is not None and engine.workers == "auto":
        return f"on the Ray cluster {engine.address}"
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():  # the workers follow what it has
        from ..engine.backends.ray.connect import counted

        engine = counted(engine)
    count = engine.count_workers()
    workers = f"{count} worker{'s' if count != 1 else ''}"
    return f"{workers} on {'Ray' if engine.address is None else f'the Ray cluster {engine.address}'}"


def shown(quiet: bool) -> list[Observer]:
    """The observers of a command that runs an experiment. quiet: whether to show no progress."""
    return [] if quiet else [FirstLine(), Progress()]


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None

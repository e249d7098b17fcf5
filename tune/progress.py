"""Progress of a run: a line that says what is run, then the round, loss, accuracy and clients per second, as a live
line or as lines of a log."""

from __future__ import annotations

import sys
from typing import Any

from ..engine.config.run_spec import RunSpec
from ..engine.config.schema import Asynchronous
from ..engine.records.event_log import STILL
from ..engine.rounds.driver import Record
from ..engine.runs.observer import Observer
from ..engine.runs.result import Result
from .pulse import Pulse
from .streams import tell

SHOWN = ("loss", "accuracy", "clients/s")


class Progress(Observer):
    """An observer that updates a line on a terminal or below the cell of a notebook.

    Elsewhere, as in the log of a batch job, it prints a line to standard error after the first ten seconds, and then at
    growing intervals of at most a minute.
    """

    def __init__(self) -> None:
        self.bar: Any = None
        self.cell: Any = None  # IPython's handle of the line in a notebook
        self.task: Any = None
        self.pulse: Pulse | None = None  # of the lines of a log
        self.rounds: int = 0
        self.shown: dict[str, str] = {}

    def begin(self, run_spec: RunSpec, facts: dict[str, Any]) -> None:
        self.rounds = run_spec.last_round
        if in_notebook():
            from IPython.display import display

            self.cell = display({"text/plain": "starting"}, raw=True, display_id=True)
        if not sys.stderr.isatty():
            self.pulse = Pulse() if self.cell is None else None
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self.bar = Progress(
            TextColumn("round"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self.bar.start()
        self.task = self.bar.add_task("starting", total=self.rounds)

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
        if self.pulse is not None and self.pulse.due():
            tell(line)
        if self.bar is not None:
            self.bar.update(self.task, completed=record["round"], description=text)

    def event(self, text: str) -> None:
        if self.bar is not None:
            self.bar.console.print(text.split("\n")[0], highlight=False, markup=False)
        elif text.startswith(STILL):
            tell(text)

    def end(self, result: Result) -> None:
        self._stop()

    def failed(self, error: BaseException) -> None:
        self._stop()

    def _stop(self) -> None:
        if self.bar is not None:
            self.bar.stop()


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

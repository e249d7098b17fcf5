"""How a study gets on: a live line on a terminal, else a line for each cell that ends. To standard error."""

from __future__ import annotations

import sys
import time
from typing import Any

from .cells import Cell
from .folder import DIVERGED, FAILED, FINISHED, Folder
from .pool import Event
from .spec import Study
from .worker import INTERRUPTED

ENDS = (FINISHED, DIVERGED, FAILED, INTERRUPTED)


class Progress:
    """`begin` a wave of cells, tell it every `event`, `end` it."""

    def __init__(self, study: Study, folder: Folder, jobs: int) -> None:
        self.study, self.folder, self.jobs = study, folder, jobs
        self.best: tuple[float, str] | None = None
        self.running: dict[str, tuple[Cell, int]] = {}
        self.bar: Any = None

    def begin(self, what: str, total: int, old: list[Cell]) -> None:
        """`old`: cells that were over before."""
        self.what, self.total, self.done, self.old = what, total, len(old), len(old)
        self.since = time.monotonic()
        for cell in old:
            self._better(cell)
        if sys.stderr.isatty():
            self._bar()

    def event(self, event: Event) -> None:
        if event.what in ENDS:
            self.running.pop(event.cell.key, None)
            if event.what != INTERRUPTED:
                self.done += 1
                self._better(event.cell)
                self._line(event)
        else:
            self.running[event.cell.key] = (event.cell, event.number)
        if self.bar is not None:
            self.bar.update(self.task, completed=self.done, description=f"{self.state()}\n{self._under_way()}")

    def end(self) -> None:
        if self.bar is not None:
            self.bar.stop()
            self.bar = None

    def state(self) -> str:
        left = self.total - self.done - len(self.running)
        best = f", best {self.value(self.best[0])} {self.best[1]}" if self.best else ""
        return f"{len(self.running)} running, {left} left{best}{self._eta()}"

    def value(self, number: float) -> str:
        return shown(self.study.report.metric, number)

    def _eta(self) -> str:
        """From the wall time of the cells that this wave has run; in parts of those under way as well."""
        parts = sum(number / rounds(cell) for cell, number in self.running.values())
        made = self.done - self.old + parts
        if made <= 0:
            return ""
        seconds = (time.monotonic() - self.since) / made * (self.total - self.old - made)
        return f", about {duration(seconds)}"

    def _better(self, cell: Cell) -> None:
        value = self.folder.final(cell, self.study.report.metric, self.study.report.last)
        sign = 1 if self.study.report.best == "max" else -1
        if value == value and (self.best is None or sign * value > sign * self.best[0]):
            self.best = (value, cell.label)

    def _line(self, event: Event) -> None:
        cell, report = event.cell, self.study.report
        outcome = event.what
        if outcome == FINISHED:
            outcome = self.value(self.folder.final(cell, report.metric, report.last))
        elif outcome == FAILED:
            outcome = f"failed: {self.folder.failure(cell).get('reason', 'no reason is known')}"
        chosen = f" ({cell.chosen})" if cell.settings else ""
        self._print(f"{self.what} {self.done}/{self.total}  {cell.label}{chosen}: {outcome}; {self.state()}")

    def _print(self, line: str) -> None:
        if self.bar is None:
            print(line, file=sys.stderr, flush=True)
        elif not line.endswith("%"):
            self.bar.console.print(line.partition(";")[0], highlight=False, markup=False)

    def _under_way(self) -> str:
        return "  ".join(f"{cell.label} {number / rounds(cell):.0%}" for cell, number in self.running.values())

    def _bar(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        columns = (TextColumn(self.what), MofNCompleteColumn(), BarColumn(20), TextColumn("{task.description}"))
        self.bar = Progress(*columns, console=Console(stderr=True))
        self.bar.start()
        self.task = self.bar.add_task("starting", total=self.total, completed=self.done)


def rounds(cell: Cell) -> int:
    return int(cell.data["federation"]["rounds"])


def is_share(metric: str) -> bool:
    """Whether a metric is told in per cent."""
    return metric.rsplit("/", 1)[-1].startswith(("accuracy", "auc"))


def shown(metric: str, value: float) -> str:
    return f"{100 * value:.1f} %" if is_share(metric) else f"{value:.4g}"


def duration(seconds: float) -> str:
    """ "42 s", "7 min", "2.5 h"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"

"""Progress of many runs on standard error: one line that is updated on a terminal; else a line for each run that ends,
and lines in between if that takes long."""

from __future__ import annotations

import sys
import time
from collections.abc import Hashable
from itertools import islice
from typing import Any

from ..pulse import Pulse
from ..quantities import duration
from ..streams import tell

NAMED = 8
"""The most runs under way that are named. A search may have thousands."""


class LiveLine:
    """Counts runs and estimates the remaining time. A subclass names the best run so far in `best_text`."""

    def __init__(self, quiet: bool = False) -> None:
        """quiet: whether to print nothing."""
        self.quiet = quiet
        self.bar: Any = None
        self.pulse = Pulse()

    def open(self, what: str, total: int, done: int) -> None:
        """Begin to count. what: name of a run, trial or cell; done: number of the `total` runs that ended before."""
        self.what, self.total, self.done, self.earlier = what, total, done, done
        self.shares: dict[Hashable, tuple[str, float]] = {}  # run under way -> label, share of its rounds that is done
        self.since = time.monotonic()
        if self.quiet:
            return
        if not sys.stderr.isatty():  # a reader of a log shall know at once that something has begun
            tell(f"{what}s: {done} of {total} done, starting")
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        columns = (TextColumn(what), MofNCompleteColumn(), BarColumn(20), TextColumn("{task.description}"))
        self.bar = Progress(*columns, console=Console(stderr=True))
        self.bar.start()
        self.task = self.bar.add_task("starting", total=total, completed=done)

    def advance(self, key: Hashable, label: str, share: float) -> None:
        """A run is under way. share: the part of its rounds that is done."""
        self.shares[key] = (label, share)
        self._update()

    def drop(self, key: Hashable) -> None:
        """A run is no longer under way, and does not count as ended."""
        self.shares.pop(key, None)
        self._update()

    def finish(self, key: Hashable) -> None:
        """A run has ended; the caller prints its line by `say` next."""
        self.done += 1
        self.drop(key)

    def say(self, line: str, detail: str) -> None:
        """Print how a run has ended. detail: the end of the line, left out if a live line shows the same."""
        if self.quiet:
            return
        if self.bar is None:
            tell(line + detail)
        else:
            self.bar.console.print(line, highlight=False, markup=False)

    def close(self) -> None:
        """Remove the live line."""
        if self.bar is not None:
            self.bar.stop()
            self.bar = None

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

    def _update(self) -> None:
        if self.quiet:
            return
        if self.bar is not None:
            self.bar.update(self.task, completed=self.done, description=f"{self.state()}\n{self._under_way()}")
        elif self.shares and self.pulse.due():
            tell(f"{self.done} of {self.total} done, {self.state()}: {self._under_way()}")

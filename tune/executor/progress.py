"""How many runs get on, on standard error: a live line on a terminal, else a line for each run that ends."""

from __future__ import annotations

import sys
import time
from collections.abc import Hashable
from typing import Any

from ..quantities import duration


class LiveLine:
    """Counts runs. A subclass says what is best so far, in `best_told`."""

    def __init__(self) -> None:
        self.bar: Any = None

    def open(self, what: str, total: int, done: int) -> None:
        """what: a run is called, trial or cell; done: those of `total` that had ended before."""
        self.what, self.total, self.done, self.earlier = what, total, done, done
        self.shares: dict[Hashable, tuple[str, float]] = {}  # run under way -> its label, the share of its rounds
        self.since = time.monotonic()
        if not sys.stderr.isatty():
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        columns = (TextColumn(what), MofNCompleteColumn(), BarColumn(20), TextColumn("{task.description}"))
        self.bar = Progress(*columns, console=Console(stderr=True))
        self.bar.start()
        self.task = self.bar.add_task("starting", total=total, completed=done)

    def advance(self, key: Hashable, label: str, share: float) -> None:
        """A run is under way; share: the part of its rounds that is over."""
        self.shares[key] = (label, share)
        self._update()

    def drop(self, key: Hashable) -> None:
        """A run is no longer under way."""
        self.shares.pop(key, None)
        self._update()

    def finish(self, key: Hashable) -> None:
        """A run has ended; tell it by `say` next."""
        self.done += 1
        self.drop(key)

    def say(self, line: str, detail: str) -> None:
        """line: how a run has ended; detail: the rest of it, where there is no live line that says the same."""
        if self.bar is None:
            print(line + detail, file=sys.stderr, flush=True)
        else:
            self.bar.console.print(line, highlight=False, markup=False)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.stop()
            self.bar = None

    def state(self) -> str:
        left = max(0, self.total - self.done - len(self.shares))
        return f"{len(self.shares)} running, {left} left{self.best_told()}{self._time_left()}"

    def best_told(self) -> str:
        """ ", best 87.6 % (trial 0)", or nothing."""
        return ""

    def _time_left(self) -> str:
        """From the wall time of the runs that have ended, in parts of those under way as well."""
        made = self.done - self.earlier + sum(share for _, share in self.shares.values())
        left = self.total - self.earlier - made
        return f", about {duration((time.monotonic() - self.since) / made * left)}" if made > 0 and left > 0 else ""

    def _update(self) -> None:
        if self.bar is not None:
            under_way = "  ".join(f"{label} {share:.0%}" for label, share in self.shares.values())
            self.bar.update(self.task, completed=self.done, description=f"{self.state()}\n{under_way}")

"""How a search gets on, on standard error: a live line on a terminal, else a line for each trial that ends."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from ...engine.config.schema import Experiment
from ...engine.rounds.driver import Record
from ..study.progress import duration, shown
from .ledger import Trial
from .plan import Plan


class Progress:
    """A watcher."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.name, self.mode = next(iter(plan.settings.objectives.items()))
        self.ended: list[Trial] = []
        self.running: dict[int, float] = {}  # trial -> the share of its rounds that is done
        self.rounds: dict[int, int] = {}
        self.bar: Any = None

    def begins(self, trials: list[Trial]) -> None:
        """trials: of earlier parts of the search."""
        self.ended = [t for t in trials if t.status != "running"]
        self.earlier, self.since = len(self.ended), time.monotonic()
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
            from rich.progress import Progress as Bar

            columns = (TextColumn("trial"), MofNCompleteColumn(), BarColumn(20), TextColumn("{task.description}"))
            self.bar = Bar(*columns, console=Console(stderr=True))
            self.bar.start()
            self.task = self.bar.add_task("starting", total=self.plan.trials, completed=len(self.ended))

    def trial_begins(self, number: int, params: dict[str, Any], experiment: Experiment) -> None:
        self.running[number], self.rounds[number] = 0.0, experiment.federation.rounds
        self._update()

    def trial_rounds(self, number: int, rows: list[Record]) -> None:
        if rows:
            self.running[number] = rows[-1]["round"] / self.rounds[number]
            self._update()

    def trial_ends(self, trial: Trial) -> None:
        self.running.pop(trial.number, None)
        self.ended.append(trial)
        outcome = self._outcome(trial)
        params = ", ".join(f"{key} {short(value)}" for key, value in trial.params.items())
        line = f"trial {trial.number}: {outcome}, {trial.rounds} rounds, {params}"
        if self.bar is None:
            print(f"{line}; {len(self.ended)} of {self.plan.trials} done, {self.state()}", file=sys.stderr, flush=True)
        else:
            self.bar.console.print(line, highlight=False, markup=False)
        self._update()

    def ends(self, status: str) -> None:
        if self.bar is not None:
            self.bar.stop()
            self.bar = None

    def state(self) -> str:
        left = max(0, self.plan.trials - len(self.ended) - len(self.running))
        best = self.best()
        told = f", best {shown(self.name, best.values[0])} (trial {best.number})" if best else ""
        return f"{len(self.running)} running, {left} left{told}{self._eta()}"

    def best(self) -> Trial | None:
        sign = 1 if self.mode == "max" else -1
        return max((t for t in self.ended if t.values), key=lambda t: sign * t.values[0], default=None)

    def _outcome(self, trial: Trial) -> str:
        if trial.values:
            named = zip(self.plan.settings.objectives, trial.values, strict=True)
            return ", ".join(f"{name} {shown(name, value)}" for name, value in named)
        return f"{trial.status}: {trial.reason}" if trial.reason else trial.status

    def _eta(self) -> str:
        """From the time that trials took so far, in parts of those under way as well."""
        made = len(self.ended) - self.earlier + sum(self.running.values())
        left = self.plan.trials - self.earlier - made
        return f", about {duration((time.monotonic() - self.since) / made * left)}" if made and left > 0 else ""

    def _update(self) -> None:
        if self.bar is not None:
            self.bar.update(self.task, completed=len(self.ended), description=self.state())


def short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else value if isinstance(value, str) else json.dumps(value)

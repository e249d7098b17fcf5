"""Progress of a search on standard error."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ...engine.rounds.driver import Record
from ..executor.observed import RunsObserver
from ..progress import ProgressOfRuns
from ..units import shown
from .plan import SearchPlan
from .trial_store import Trial


class SearchProgress(ProgressOfRuns, RunsObserver[Trial]):
    """An observer that prints the trials that end, and a live line on a terminal."""

    def __init__(self, plan: SearchPlan) -> None:
        super().__init__()
        self.plan = plan
        self.name, self.mode = next(iter(plan.settings.objectives.items()))
        self.rounds: dict[int, int] = {}

    def begins(self, what: str, total: int, ended: Sequence[Trial]) -> None:
        self.ended = [*ended]
        self.open(what, total, len(ended))

    def run_begins(self, run: Trial, rounds: int) -> None:
        self.rounds[run.number] = rounds
        if rounds:
            self.advance(run.number, f"trial {run.number}", 0.0)

    def run_rounds(self, run: Trial, rows: list[Record]) -> None:
        if rows:
            self.advance(run.number, f"trial {run.number}", rows[-1]["round"] / self.rounds[run.number])

    def run_ends(self, run: Trial) -> None:
        self.ended.append(run)
        self.finish(run.number)
        params = ", ".join(f"{key} {short(value)}" for key, value in run.params.items())
        line = f"trial {run.number}: {self._outcome(run)}, {run.rounds} rounds, {params}"
        self.say(line, f"; {self.done} of {self.total} done, {self.state()}")

    def ends(self, status: str) -> None:
        self.close()

    def best_text(self) -> str:
        sign = 1 if self.mode == "max" else -1
        best = max((t for t in self.ended if t.values), key=lambda t: sign * t.values[0], default=None)
        return f", best {shown(self.name, best.values[0])} (trial {best.number})" if best else ""

    def _outcome(self, trial: Trial) -> str:
        if trial.values:
            named = zip(self.plan.settings.objectives, trial.values, strict=True)
            return ", ".join(f"{name} {shown(name, value)}" for name, value in named)
        return f"{trial.status}: {trial.reason}" if trial.reason else trial.status


def short(value: Any) -> str:
    """A parameter's value as short text."""
    return f"{value:.4g}" if isinstance(value, float) else value if isinstance(value, str) else json.dumps(value)

"""Progress of a search on standard error."""

from __future__ import annotations

import json
from typing import Any

from ...engine.config.schema import Experiment
from ...engine.rounds.driver import Record
from ..progress import ProgressOfRuns
from ..quantities import shown
from .plan import Plan
from .trial_source import SearchObserver
from .trial_store import Trial


class SearchProgress(ProgressOfRuns, SearchObserver):
    """An observer that prints the trials that end, and a live line on a terminal."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan
        self.name, self.mode = next(iter(plan.settings.objectives.items()))
        self.rounds: dict[int, int] = {}

    def begins(self, trials: list[Trial]) -> None:
        self.ended = [t for t in trials if t.status != "running"]
        self.open("trial", self.plan.trials, len(self.ended))

    def trial_begins(self, number: int, params: dict[str, Any], experiment: Experiment | None) -> None:
        if experiment is None:
            return
        self.rounds[number] = experiment.federation.rounds
        self.advance(number, f"trial {number}", 0.0)

    def trial_rounds(self, number: int, rows: list[Record]) -> None:
        if rows:
            self.advance(number, f"trial {number}", rows[-1]["round"] / self.rounds[number])

    def trial_ends(self, trial: Trial) -> None:
        self.ended.append(trial)
        self.finish(trial.number)
        params = ", ".join(f"{key} {short(value)}" for key, value in trial.params.items())
        line = f"trial {trial.number}: {self._outcome(trial)}, {trial.rounds} rounds, {params}"
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

"""Progress of a search on standard error."""

from __future__ import annotations

import json
import math
from typing import Any

from ..progress import ProgressOfRuns
from ..units import shown
from .plan import SearchPlan
from .trial_store import Trial


class SearchProgress(ProgressOfRuns[Trial]):
    """The progress of a search; the best trial is that of the first objective."""

    def __init__(self, plan: SearchPlan) -> None:
        self.objectives = plan.settings.objectives
        metric, mode = next(iter(self.objectives.items()))
        super().__init__(metric, mode == "max")

    def key(self, run: Trial) -> int:
        return run.number

    def label(self, run: Trial) -> str:
        return f"trial {run.number}"

    def value(self, run: Trial) -> float:
        return run.values[0] if run.values else math.nan

    def lines(self, run: Trial) -> tuple[str, str]:
        outcome = f"{run.status}: {run.reason}" if run.reason else run.status
        if run.values:
            named = zip(self.objectives, run.values, strict=True)
            outcome = ", ".join(f"{name} {shown(name, value)}" for name, value in named)
        params = ", ".join(f"{key} {short(value)}" for key, value in run.params.items())
        line = f"{self.label(run)}: {outcome}, {run.rounds} rounds, {params}"
        return line, f"; {self.done} of {self.total} done, {self.state()}"


def short(value: Any) -> str:
    """A parameter's value as short text."""
    return f"{value:.4g}" if isinstance(value, float) else value if isinstance(value, str) else json.dumps(value)

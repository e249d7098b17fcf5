"""The results of trials that shared processes, with the functions of `ray.tune.ResultGrid` that people use."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ...engine.config.schema import Experiment
from ...engine.errors import ConfigError, FedFleetError, nearest
from ...engine.rounds.driver import Record
from ...engine.runs.chart import needs
from .folder import trial_folder
from .plan import Plan
from .trial_source import SearchObserver, add_record
from .trial_store import Trial

if TYPE_CHECKING:
    import pandas as pd


@dataclass
class TrialResult:
    """What one trial gave.

    `metrics`: its last record and its `status`, None before its first record. `config`: its values by dotted key, as
    `config["params"]`. `path`: its folder. `error`: why it failed, None if it did not. `records`: of all its rounds.
    """

    config: dict[str, Any]
    path: str
    records: list[Record] = field(default_factory=list, repr=False)
    status: str = "running"
    error: Exception | None = None

    @property
    def metrics(self) -> dict[str, Any] | None:
        return {**self.records[-1], "status": self.status} if self.records else None

    @property
    def metrics_dataframe(self) -> pd.DataFrame:
        """The records as a data frame of pandas, one row for each round."""
        needs("pandas", "or use records")
        import pandas as pd

        return pd.DataFrame(self.records)


class Results(SearchObserver):
    """The results of the trials that a call of `search` has run, in the order in which they began."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan: Plan = plan
        self.folder: Path = folder
        self.trials: dict[int, TrialResult] = {}

    # --- while trials run ---------------------------------------------------------------------------------------------
    def trial_begins(self, number: int, params: dict[str, Any], experiment: Experiment | None) -> None:
        self.trials[number] = TrialResult({"params": params}, str(trial_folder(self.folder, number)))

    def trial_rounds(self, number: int, rows: list[Record]) -> None:
        for row in rows:
            add_record(self.trials[number].records, row)

    def trial_ends(self, trial: Trial) -> None:
        result = self.trials[trial.number]
        result.status = trial.status
        if trial.status == "failed":
            result.error = FedFleetError(f"trial {trial.number}: {trial.reason}")

    # --- afterwards ---------------------------------------------------------------------------------------------------
    def __len__(self) -> int:
        return len(self.trials)

    def __iter__(self) -> Iterator[TrialResult]:
        return iter(self.trials.values())

    def __getitem__(self, i: int) -> TrialResult:
        return list(self.trials.values())[i]

    def __repr__(self) -> str:
        return f"Results({list(self)!r})"

    @property
    def errors(self) -> list[Exception]:
        """Of the trials that failed."""
        return [result.error for result in self if result.error is not None]

    @property
    def num_errors(self) -> int:
        return len(self.errors)

    @property
    def num_terminated(self) -> int:
        """The number of trials that ended and did not fail."""
        return sum(result.status not in ("running", "failed") for result in self)

    def get_best_result(
        self,
        metric: str | None = None,
        mode: Literal["min", "max"] | None = None,
        scope: Literal["last", "all"] = "last",
        filter_nan_and_inf: bool = True,
    ) -> TrialResult:
        """The trial with the best value of a column; metric, mode: by default those of the search's first objective.

        scope: whether the last value of each trial counts, or the best of all its values. filter_nan_and_inf: whether
        values that are not finite do not count. Raises ConfigError if no record has the column.
        """
        objectives = self.plan.settings.objectives
        metric = metric or next(iter(objectives))
        mode = mode or objectives.get(metric)
        if mode not in ("min", "max"):
            raise ConfigError(f"mode must be min or max, got {mode!r}; name the mode of {metric}")
        choose = max if mode == "max" else min
        values: list[tuple[float, TrialResult]] = []
        for result in self:
            found = [float(record[metric]) for record in result.records if metric in record]
            found = [value for value in found if math.isfinite(value) or not filter_nan_and_inf]
            if found:
                values.append((choose(found) if scope == "all" else found[-1], result))
        if not values:
            columns = sorted({column for result in self for record in result.records for column in record})
            raise ConfigError(f"metric: no trial has a value of {metric}; {nearest(metric, columns)}")
        return choose(values, key=lambda pair: pair[0])[1]

    def get_dataframe(
        self, filter_metric: str | None = None, filter_mode: Literal["min", "max"] | None = None
    ) -> pd.DataFrame:
        """A data frame of pandas with one row for each trial: `trial_id`, the columns of a record, `status`, and its
        values as `config/params/KEY`. filter_metric, filter_mode: take the record of each trial that is best in this
        column, instead of the last one."""
        needs("pandas", "or use iteration")
        import pandas as pd

        rows = []
        for number, result in self.trials.items():
            record = result.records[-1] if result.records else {}
            rated = [each for each in result.records if filter_metric in each]
            if filter_metric is not None and rated:
                best = max if filter_mode == "max" else min
                record = best(rated, key=lambda each: each[filter_metric])
            params = {f"config/params/{key}": value for key, value in result.config["params"].items()}
            rows.append({"trial_id": f"{number:04d}", **record, "status": result.status, **params})
        return pd.DataFrame(rows)

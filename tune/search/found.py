"""What a search has found: as an object for Python, and as files in the folder of the search."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from optuna import Study, load_study

from ...engine.config.schema import Experiment, experiment
from ...engine.errors import FedFleetError
from ...engine.records.history import Record
from ...engine.runs.chart import optional
from ...engine.runs.saved_files import read_rows
from ...engine.storage.atomic_write import write
from ...engine.storage.secrets import redacted_data
from ..ranges import decided
from .folder import BEST, trial_folder
from .optuna_storage import open_storage, storage_url
from .plan import SearchPlan
from .report import write_search_report
from .trial_store import Trial, TrialStore

if TYPE_CHECKING:
    import pandas as pd

STATUSES = ("finished", "pruned", "diverged", "failed", "running")


@dataclass(frozen=True)
class Found:
    """The outcome of a search.

    `best`: the experiment with the best trial's values instead of its ranges, as plain data; `folder`/best.yaml has the
    same for `fedfleet run`. `values`: objective -> the best trial's value. `trials`: all trials. `front`: the Pareto
    front of several objectives, in which `best` is the best in the first objective; else only the best trial.
    `storage`, `study_name`: Optuna's.
    """

    search_id: str
    folder: Path
    best: dict[str, Any]
    values: dict[str, float]
    trials: tuple[Trial, ...]
    front: tuple[Trial, ...]
    storage: str = field(default="", repr=False)
    study_name: str = ""

    @property
    def study(self) -> Study:
        """The study of Optuna, with all trials and their values after every evaluated round."""
        return load_study(study_name=self.study_name, storage=open_storage(self.storage))

    def records(self, number: int) -> list[Record]:
        """The records of a trial's rounds, [] for one that had none."""
        record = trial_folder(self.folder, number) / "rounds.parquet"
        return read_rows(record) if record.is_file() else []

    def to_pandas(self) -> pd.DataFrame:
        """The trials as a data frame of pandas, one row for each: `number`, `status`, a column for each objective and
        each range (by its dotted key), `rounds` and `reason`. Raises ConfigError if pandas is not installed."""
        pandas = optional("pandas", "or use trials")
        rows = [
            {
                "number": trial.number,
                "status": trial.status,
                **dict(zip(self.values, trial.values, strict=False)),
                **trial.params,
                "rounds": trial.rounds,
                "reason": trial.reason,
            }
            for trial in self.trials
        ]
        return pandas.DataFrame(rows).set_index("number")

    @property
    def value(self) -> float:
        """The best trial's value of the first objective."""
        return next(iter(self.values.values()))

    @property
    def experiment(self) -> Experiment:
        """The best trial's experiment."""
        return experiment(self.best)

    def summary(self) -> dict[str, Any]:
        """The object that `--json` prints."""
        counts = {status: sum(t.status == status for t in self.trials) for status in STATUSES}
        return {
            "search_id": self.search_id,
            "folder": str(self.folder),
            "trials": len(self.trials),
            **{status: count for status, count in counts.items() if count},
            "best": {"number": self.front[0].number, "params": self.front[0].params, "values": self.values},
            "front": [{"number": t.number, "params": t.params, "values": list(t.values)} for t in self.front],
            "file": str(self.folder / BEST),
        }


def found(plan: SearchPlan, store: TrialStore, folder: Path, search_id: str) -> Found:
    """The outcome, whose files are written. Raises FedFleetError if no trial finished."""
    trials, front = tuple(store.trials()), store.best()
    if not front:
        reasons = [f"trial {t.number}: {t.reason}" for t in trials if t.reason]
        why = f"; {reasons[0]}" if reasons else ""
        raise FedFleetError(f"none of {len(trials)} trials finished{why}; see {folder / 'trials'}")
    best = decided(plan.data, front[0].params)
    values = dict(zip(plan.settings.objectives, front[0].values, strict=True))
    write(folder / BEST, winner(best, front[0], values))
    write_front(plan, front if len(front) > 1 else [], folder / "front")
    database = storage_url(plan.settings.storage, folder)
    outcome = Found(search_id, folder, best, values, trials, tuple(front), database, store.study.study_name)
    write(folder / "result.json", json.dumps(outcome.summary(), indent=2) + "\n")
    write_search_report(plan, store, folder / "report.html")
    return outcome


def write_front(plan: SearchPlan, front: list[Trial], folder: Path) -> None:
    """Write the experiment files of the Pareto front, and remove those of an earlier part of the search that are no
    longer on it. front: [] for none."""
    names = {f"{trial.number:04d}.yaml": trial for trial in front}
    if front:
        folder.mkdir(exist_ok=True)
    for name, trial in names.items():
        its = dict(zip(plan.settings.objectives, trial.values, strict=True))
        write(folder / name, winner(decided(plan.data, trial.params), trial, its))
    for path in folder.glob("*.yaml"):
        if path.stem.isdigit() and path.name not in names:
            path.unlink()


def winner(best: dict[str, Any], trial: Trial, values: dict[str, float]) -> str:
    """The experiment file of a trial without secrets, with its values in a comment."""
    text = ", ".join(f"{name} {value:.6g}" for name, value in values.items())
    return f"# Trial {trial.number} of a search: {text}.\n{yaml.safe_dump(redacted_data(best), sort_keys=False)}"

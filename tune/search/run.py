"""Runs a search from its beginning, or from where it stopped, to its end."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from optuna import Study, load_study

from ...engine.config.schema import Experiment, experiment
from ...engine.errors import ConfigError, FedFleetError, Interrupted
from ...engine.runs.chart import needs
from ...engine.runs.expected_columns import check_column
from ...engine.runs.launch import prepare
from ...engine.stopping import Stop, stopping
from ...engine.storage.atomic_write import write
from ...engine.storage.expanded import expanded
from ...engine.storage.lock import exclusive
from ...engine.storage.secrets import redacted_data
from ..executor.executor import Executor, check_together, processes_here, why_not_together
from ..executor.jobs import Jobs
from ..executor.source import remove_resume_files
from ..ranges import corners, decided
from .folder import BEST, LOCK, SAVED, SearchIds, load, nothing_left, refuse, search_ids, trial_folder
from .optuna_storage import open_storage, storage_url
from .plan import TOTALS, Plan, plan
from .progress import SearchProgress
from .report import import_packages, write_search_report
from .results import Results
from .tracking import SearchTracker
from .trial_source import SearchObserver, TrialSource, inner
from .trial_store import Trial, TrialStore

if TYPE_CHECKING:
    import pandas as pd
    from ray.tune import ResultGrid


@dataclass(frozen=True)
class Found:
    """The outcome of a search.

    `best`: the experiment with the best trial's values instead of its ranges, as plain data; `folder`/best.yaml has the
    same for `fedfleet run`. `values`: objective -> the best trial's value. `trials`: all trials. `front`: the Pareto
    front of several objectives, in which `best` is the best in the first objective; else only the best trial.
    `storage`, `study_name`: Optuna's. `results`: of the trials of this call, `Results` if they shared processes, else
    what Ray Tune gives, a `ray.tune.ResultGrid` without files; None if no trial was left to run.
    """

    search_id: str
    folder: Path
    best: dict[str, Any]
    values: dict[str, float]
    trials: tuple[Trial, ...]
    front: tuple[Trial, ...]
    storage: str = field(default="", repr=False)
    study_name: str = ""
    results: ResultGrid | Results | None = field(default=None, compare=False, repr=False)

    @property
    def study(self) -> Study:
        """The study of Optuna, with all trials and their values after every evaluated round."""
        return load_study(study_name=self.study_name, storage=open_storage(self.storage))

    def to_pandas(self) -> pd.DataFrame:
        """The trials as a data frame of pandas, one row for each: `number`, `status`, a column for each objective and
        each range (by its dotted key), `rounds` and `reason`. Raises ConfigError if pandas is not installed."""
        needs("pandas", "or use trials")
        import pandas as pd

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
        return pd.DataFrame(rows).set_index("number")

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


STATUSES = ("finished", "pruned", "diverged", "failed", "running")


def search(
    data: Mapping[str, Any],
    folder: str | Path,
    *,
    resume: bool = False,
    progress: bool = False,
    parent: str | None = None,
    stop: Stop | None = None,
) -> Found:
    """Find the best values for the ranges in an experiment, such as {search: loguniform, low: 1e-3, high: 1}.

    data: plain data of the experiment, as `files.load_data` reads them, with ranges and optionally a section `search`
    (see `plan.Search`). folder: for the search's files. resume: continue the search in the folder if there is one; a
    complete search returns at once, and `data` must be the same except for FREE and FREE_OF_TRIALS. progress: show the
    progress on standard error. parent: id of an MLflow run in which the search's run is nested. stop: the flag of the
    caller that signals set, where the search is a part of something that they end too.

    Connects to Ray or starts it, unless trials share processes. Raises ConfigError for a search that cannot run as it
    is written, Interrupted on a signal (`resume` then loses no trial that has ended), FedFleetError if no trial
    finished.
    """
    if folder == "":
        raise ConfigError("folder must name the search's folder, got an empty text; give a path")
    wanted, path = plan(dict(data)), expanded(folder).resolve()
    refuse(wanted, path, resume)
    with shared_processes(wanted) as jobs:  # they start while this process prepares the search
        if jobs is not None and all(each.key.startswith("method.") for each in wanted.ranges):
            jobs.load(inner(first_experiment(wanted), wanted.settings.workers).plain())
        try_out(wanted, path)
        with exclusive(path, LOCK):
            refuse(wanted, path, resume)  # again, since another process may have used the folder
            with nothing_left(path):
                source = prepared(wanted, path, progress, parent)
            return conducted(source, jobs, stop)


def prepared(wanted: Plan, folder: Path, progress: bool, parent: str | None) -> TrialSource:
    """Prepare everything except the trials, so that configuration errors are raised before anything runs."""
    kept = search_ids(folder, wanted)
    data = wanted.plain()
    has_secrets = redacted_data(data) != data  # they stay in the file, for a search that is resumed from it
    write(folder / SAVED, yaml.safe_dump(data, sort_keys=False), private=has_secrets)
    store = store_of(wanted, folder, kept)
    watched_by = observers(wanted, folder, kept.search_id, progress, parent)
    return TrialSource(wanted, store, folder, kept.search_id, watched_by)


def store_of(wanted: Plan, folder: Path, kept: SearchIds) -> TrialStore:
    """The trials of the search in a folder."""
    url = storage_url(wanted.settings.storage, folder)
    return TrialStore(wanted, url, kept.study, kept.search_id, earlier=not kept.owns)


def observers(wanted: Plan, folder: Path, search_id: str, progress: bool, parent: str | None) -> list[SearchObserver]:
    tracking = first_experiment(wanted).tracking
    found: list[SearchObserver] = [SearchProgress(wanted)] if progress else []
    if tracking.uri != "none" and tracking.name == "mlflow":
        found.append(SearchTracker(wanted, tracking, folder, search_id, parent))
    return found


def conducted(source: TrialSource, jobs: Jobs | None, flag: Stop | None = None) -> Found:
    """Run the trials that are left, and notify the observers. flag: that a signal sets, a new one by default."""
    status = "failed"
    with stopping(flag) as stop:
        clean_up_ended(source)
        for observer in source.observers:
            observer.begins(source.store.trials())
        results = None
        try:
            if source.store.open() and not stop():
                with suppress(Interrupted):  # while Ray starts; told in the next line
                    results = execute(source, stop, jobs)
            if stop():
                raise Interrupted(stop(), left(source))
            if source.broken:
                raise source.broken
            outcome = replace(found(source), results=results)
            status = "finished"
            return outcome
        except (Interrupted, KeyboardInterrupt):
            status = "killed"
            raise
        finally:
            clean_up_ended(source)
            for observer in source.observers:
                observer.ends(status)


def execute(source: TrialSource, stop: Callable[[], int], jobs: Jobs | None) -> ResultGrid | Results:
    """Run trials until none is left or `stop` returns the number of a signal; returns their results. jobs: the
    processes that trials share, None if each has its own."""
    plan = source.plan
    shared = Results(plan, source.folder)
    if jobs is not None:
        source.observers.append(shared)
    at_once = None if plan.settings.concurrent == "auto" else plan.settings.concurrent
    engine, workers = first_experiment(plan).engine, plan.settings.workers
    threading.Thread(target=import_packages, args=(plan,), name="imports", daemon=True).start()
    with Executor(engine, lambda: stop() or source.broken, at_once, workers, jobs=jobs) as executor:
        if jobs is None:
            try:
                executor.start()
            except ConfigError as error:
                raise ConfigError(f"search.workers: a trial does not fit: {error}") from None
        results = executor.run(source)
    return shared if results is None else results


def shared_processes(plan: Plan) -> AbstractContextManager[Jobs | None]:
    """The processes that trials share; None if each has its own. Raises ConfigError if they must share and cannot."""
    engine = first_experiment(plan).engine
    why_not = why_not_together(engine, plan.settings.workers)
    if not why_not and "seconds" in plan.settings.objectives:
        why_not = "seconds is an objective, and trials that share a process share its time"
    if not check_together("search.together", plan.settings.together, why_not):
        return nullcontext()
    processes = processes_here(engine)
    at_once = plan.at_once(processes)
    return Jobs(min(processes, at_once), at_once)


def first_experiment(plan: Plan) -> Experiment:
    """The experiment with the first value of every range."""
    return plan.experiment(next(corners(plan.ranges)))


def left(source: TrialSource) -> str:
    """How many trials have ended, and how to resume; the end of a message."""
    trials = source.store.trials()
    ended = sum(t.status != "running" for t in trials)
    return f"; {ended} of {source.plan.trials} trials have ended; to go on: fedfleet search --resume {source.folder}"


def found(source: TrialSource) -> Found:
    """The outcome, whose files are written. Raises FedFleetError if no trial finished."""
    plan, store, folder = source.plan, source.store, source.folder
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
    outcome = Found(source.search_id, folder, best, values, trials, tuple(front), database, store.study.study_name)
    write(folder / "result.json", json.dumps(outcome.summary(), indent=2) + "\n")
    write_search_report(plan, store, folder / "report.html")
    return outcome


def write_front(plan: Plan, front: list[Trial], folder: Path) -> None:
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


def try_out(wanted: Plan, folder: Path) -> None:
    """Resolve every name at both ends of all ranges, so that configuration errors are raised before anything starts."""
    for values in corners(wanted.ranges):
        prepare(wanted.experiment(values), "search", folder)
    first = first_experiment(wanted)
    for name in wanted.settings.objectives:
        check_column(name, "search.objectives", [first], TOTALS)


def report_again(folder: Path, page: Path) -> Path:
    """Write the page of the trials that the search in a folder has so far; returns its path."""
    saved = load(folder)
    return write_search_report(saved, store_of(saved, folder, search_ids(folder, saved)), page)


def clean_up_ended(source: TrialSource) -> None:
    """Remove states and checkpoints of the trials that have ended."""
    for trial in source.store.trials():
        if trial.status != "running":
            remove_resume_files(trial_folder(source.folder, trial.number))

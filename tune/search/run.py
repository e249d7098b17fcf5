"""A search from its beginning, or from where it stopped, to its end."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ...engine.config.schema import Experiment
from ...engine.errors import ConfigError, FedFleetError, Interrupted
from ...engine.rounds.expected_columns import check_column
from ...engine.runs.launch import new_run_id, prepare
from ...engine.stopping import stopping
from ...engine.storage.atomic_write import write
from ...engine.storage.lock import exclusive
from ..executor.executor import Executor
from ..executor.source import sweep
from ..files import parse, read
from .conductor import Conductor, Watcher, trial_folder
from .ledger import Ledger, Trial, storage_url
from .plan import TOTALS, Plan, plan
from .space import corners, decided

SAVED = "search.yaml"
KEPT = "search.json"
BEST = "best.yaml"
LOCK = ".search.lock"
PREPARED = (SAVED, KEPT, "search.db")
"""What is written before the first trial."""


@dataclass(frozen=True)
class Found:
    """The outcome of a search.

    `best`: the experiment with the best trial's values in the place of its ranges, as plain data that `fedfleet run`
    accepts as a file (`folder`/best.yaml); `values`: the best trial's, by objective; `trials`: all; `front`: the Pareto
    front where there are several objectives (`best` is then the one best in the first), else the best trial alone.
    """

    search_id: str
    folder: Path
    best: dict[str, Any]
    values: dict[str, float]
    trials: tuple[Trial, ...]
    front: tuple[Trial, ...]

    @property
    def value(self) -> float:
        """Of the first objective."""
        return next(iter(self.values.values()))

    @property
    def experiment(self) -> Experiment:
        from ...engine.config.schema import experiment

        return experiment(self.best)

    def summary(self) -> dict[str, Any]:
        """What `--json` prints."""
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
) -> Found:
    """Search an experiment's ranges, {search: loguniform, low: 1e-3, high: 1} in the place of any value.

    data: an experiment's plain data, as `files.load_data` reads it, with ranges and perhaps a section `search` (see
    `plan.Search`). folder: of the search's files; with `resume` one that holds a search is gone on with, and at once
    returned from where that is complete; `data` must then be the same but for the number of trials. progress: show it
    on standard error. parent: an MLflow run to nest the search's run in.

    Ray is used as it is or started here. Raises ConfigError for what cannot be searched as it is written, Interrupted
    on SIGINT and SIGTERM (resume goes on without losing a trial that ended), FedFleetError where no trial finished.
    """
    if folder == "":
        raise ConfigError("folder must name the search's folder, got an empty text; give one")
    wanted, path = plan(dict(data)), Path(folder).resolve()
    refuse(wanted, path, resume)
    try_out(wanted, path)
    with exclusive(path, LOCK):
        refuse(wanted, path, resume)  # again: another process may have been here since
        with nothing_left(path):
            conductor = prepared(wanted, path, progress, parent)
        return conducted(conductor)


def refuse(wanted: Plan, folder: Path, resume: bool) -> None:
    """ConfigError where the folder holds a search that is not to be resumed, or another one."""
    there = (folder / SAVED).is_file()
    if there and not resume:
        raise ConfigError(f"{folder} already holds a search; choose another folder, remove it, or resume it")
    if there:
        same(load(folder), wanted, folder)


@contextmanager
def nothing_left(folder: Path) -> Iterator[None]:
    """On a ConfigError, remove what `prepared` writes, by name, unless it was there before."""
    missing = [folder / name for name in PREPARED if not (folder / name).exists()]
    try:
        yield
    except ConfigError:
        for path in missing:
            path.unlink(missing_ok=True)
        raise


def prepared(wanted: Plan, folder: Path, progress: bool, parent: str | None) -> Conductor:
    """Everything but the trials, so that a mistake is told before anything runs."""
    kept = identity(folder, wanted)
    write(folder / SAVED, yaml.safe_dump(wanted.plain(), sort_keys=False))
    ledger = Ledger(wanted, storage_url(wanted.settings.storage, folder), kept["study"])
    watching = watchers(wanted, folder, kept["search_id"], progress, parent)
    return Conductor(wanted, ledger, folder, kept["search_id"], watching)


def watchers(wanted: Plan, folder: Path, search_id: str, progress: bool, parent: str | None) -> list[Watcher]:
    from .progress import Progress
    from .tracking import SearchTracker

    tracking = wanted.experiment(next(corners(wanted.ranges))).tracking
    found: list[Watcher] = [Progress(wanted)] if progress else []
    if tracking.uri != "none" and tracking.name == "mlflow":
        found.append(SearchTracker(wanted, tracking, folder, search_id, parent))
    return found


def conducted(conductor: Conductor) -> Found:
    """Run what is left to run; tell the watchers how it ended."""
    status = "failed"
    with stopping() as stop:
        sweep_ended(conductor)
        for watcher in conductor.watchers:
            watcher.begins(conductor.ledger.trials())
        try:
            if conductor.ledger.open():
                execute(conductor, stop)
            if stop():
                raise Interrupted(stop(), left(conductor))
            if conductor.broken:
                raise conductor.broken
            outcome = found(conductor)
            status = "finished"
            return outcome
        except (Interrupted, KeyboardInterrupt):
            status = "killed"
            raise
        finally:
            sweep_ended(conductor)
            for watcher in conductor.watchers:
                watcher.ends(status)


def execute(conductor: Conductor, stop: Callable[[], int]) -> None:
    """Run trials until there is none left or `stop` has the number of a signal."""
    plan = conductor.plan
    engine = plan.experiment(next(corners(plan.ranges))).engine
    at_once = None if plan.settings.concurrent == "auto" else plan.settings.concurrent
    with Executor(engine, lambda: stop() or conductor.broken, at_once, plan.settings.workers) as executor:
        try:
            executor.start()
        except ConfigError as error:
            raise ConfigError(f"search.workers: a trial does not fit: {error}") from None
        executor.run(conductor)


def left(conductor: Conductor) -> str:
    trials = conductor.ledger.trials()
    ended = sum(t.status != "running" for t in trials)
    return (
        f"; {ended} of {conductor.plan.trials} trials have ended; to go on: fedfleet search --resume {conductor.folder}"
    )


def found(conductor: Conductor) -> Found:
    plan, ledger, folder = conductor.plan, conductor.ledger, conductor.folder
    trials, front = tuple(ledger.trials()), ledger.best()
    if not front:
        reasons = [f"trial {t.number}: {t.reason}" for t in trials if t.reason]
        why = f"; {reasons[0]}" if reasons else ""
        raise FedFleetError(f"none of {len(trials)} trials finished{why}; see {folder / 'trials'}")
    sign = -1 if plan.directions[0] == "maximize" else 1
    front.sort(key=lambda t: (sign * t.values[0], t.number))
    best = decided(plan.data, front[0].params)
    values = dict(zip(plan.settings.objectives, front[0].values, strict=True))
    write(folder / BEST, winner(best, front[0], values))
    if len(front) > 1:
        (folder / "front").mkdir(exist_ok=True)
        for trial in front:
            its = dict(zip(plan.settings.objectives, trial.values, strict=True))
            write(folder / "front" / f"{trial.number:04d}.yaml", winner(decided(plan.data, trial.params), trial, its))
    outcome = Found(conductor.search_id, folder, best, values, trials, tuple(front))
    write(folder / "result.json", json.dumps(outcome.summary(), indent=2) + "\n")
    return outcome


def winner(best: dict[str, Any], trial: Trial, values: dict[str, float]) -> str:
    told = ", ".join(f"{name} {value:.6g}" for name, value in values.items())
    return f"# Trial {trial.number} of a search: {told}.\n{yaml.safe_dump(best, sort_keys=False)}"


def try_out(wanted: Plan, folder: Path) -> None:
    """Resolve every name at both ends of all ranges, so that a mistake is told before anything starts."""
    for values in corners(wanted.ranges):
        prepare(wanted.experiment(values), "search", folder)
    first = wanted.experiment(next(corners(wanted.ranges)))
    for name in wanted.settings.objectives:
        check_column(name, "search.objectives", [first], TOTALS)


def identity(folder: Path, wanted: Plan) -> dict[str, str]:
    """The search's id and its study's name, the same when it is resumed."""
    path = folder / KEPT
    if path.is_file():
        return json.loads(path.read_text())
    search_id = new_run_id()
    study = wanted.settings.study or f"{wanted.data.get('name') or 'search'}-{search_id}"
    kept = {"search_id": search_id, "study": study}
    write(path, json.dumps(kept) + "\n")
    return kept


def load(folder: Path) -> Plan:
    """The search that a folder holds."""
    path = folder / SAVED
    if not path.is_file():
        raise ConfigError(f"{folder} holds no search; give the folder that `fedfleet search` wrote")
    return plan(parse(read(path), str(path)))


FREE = ("trials", "concurrent", "workers", "keep_models")
"""Settings that may change when a search is resumed."""


def same(kept: Plan, wanted: Plan, folder: Path) -> None:
    differing = [key for key in wanted.data if kept.data.get(key) != wanted.data[key]]
    old, new = kept.settings.model_dump(exclude=set(FREE)), wanted.settings.model_dump(exclude=set(FREE))
    differing += [f"search.{key}" for key in new if old[key] != new[key]]
    differing = [key for key in differing if key not in ("engine", "tracking")]
    if differing:
        raise ConfigError(f"the search in {folder} differs in {', '.join(differing)}; undo these changes")


def sweep_ended(conductor: Conductor) -> None:
    for trial in conductor.ledger.trials():
        if trial.status != "running":
            sweep(trial_folder(conductor.folder, trial.number))

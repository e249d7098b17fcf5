"""Runs a search from its beginning, or from where it stopped, to its end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import yaml

from ...engine.config.schema import Experiment
from ...engine.errors import ConfigError, Interrupted
from ...engine.runs.expected_columns import check_column
from ...engine.runs.prepare import prepare
from ...engine.stopping import Stop, stopping
from ...engine.storage.atomic_write import write
from ...engine.storage.expanded import expanded
from ...engine.storage.lock import exclusive
from ...engine.storage.secrets import redacted_data
from ..executor.executor import check_together, on_ray, processes_here, why_not_together
from ..executor.processes import Processes
from ..executor.source import Executor, RunsObserver, observed, remove_resume_files
from ..ranges import corners
from ..streams import tell
from ..tracking.writers import WRITERS
from .folder import LOCK, SAVED, SearchIds, load, nothing_left, refuse, search_ids, trial_folder
from .found import Found, found
from .observers import SearchProgress, SearchTracker
from .optuna_storage import storage_url
from .plan import TOTALS, SearchPlan, plan
from .report import import_packages, write_search_report
from .trial_source import TrialSource, inner
from .trial_store import Trial, TrialStore


def search(
    data: Mapping[str, Any],
    folder: str | Path,
    *,
    resume: bool = False,
    progress: bool = False,
    executor: Executor | None = None,
    stop: Stop | None = None,
) -> Found:
    """Find the best values for the ranges in an experiment, such as {search: loguniform, low: 1e-3, high: 1}.

    data: plain data of the experiment, as `files.load_data` reads them, with ranges and optionally a section `search`
    (see `plan.SearchSettings`). folder: for the search's files. resume: continue the search in the folder if there is
    one; a complete search returns at once, and of `data` only what `folder.same` allows may differ. progress: show the
    progress on standard error. executor, stop: what executes the trials, and the flag that signals set, of a caller who
    does more than this search.

    Connects to Ray or starts it, unless trials share processes. Raises ConfigError for a search that cannot run as it
    is written, Interrupted on a signal (`resume` then loses no trial that has ended), FedFleetError if no trial
    finished.
    """
    if folder == "":
        raise ConfigError("folder must name the search's folder, got an empty text; give a path")
    wanted, path = plan(dict(data)), expanded(folder).resolve()
    refuse(wanted, path, resume)
    with executor_of(wanted) if executor is None else nullcontext(executor) as executor:  # it starts meanwhile
        if all(each.key.startswith("method.") for each in wanted.ranges):
            executor.load(inner(first_experiment(wanted), wanted.settings.workers).plain())
        try_out(wanted, path)
        with exclusive(path, LOCK):
            refuse(wanted, path, resume)  # again, since another process may have used the folder
            with nothing_left(path):
                at_once = wanted.at_once(len(executor.processes)) if isinstance(executor, Processes) else None
                source = prepared(wanted, path, progress, at_once)
            return conducted(source, executor, stop)


def prepared(wanted: SearchPlan, folder: Path, progress: bool, at_once: int | None) -> TrialSource:
    """Prepare everything except the trials, so that configuration errors are raised before anything runs. at_once: the
    largest number of simultaneous trials; None: as many as the executor takes."""
    kept = search_ids(folder, wanted)
    data = wanted.plain()
    has_secrets = redacted_data(data) != data  # they stay in the file, for a search that is resumed from it
    write(folder / SAVED, yaml.safe_dump(data, sort_keys=False), private=has_secrets)
    store = store_of(wanted, folder, kept)
    if progress:
        tell(header(wanted, folder))
    watched_by = observers(wanted, folder, kept.search_id, progress)
    return TrialSource(wanted, store, folder, kept.search_id, watched_by, at_once)


def header(wanted: SearchPlan, folder: Path) -> str:
    """A search that is about to begin, in one line: what it searches for, in which ranges, and where."""
    over = ", ".join(f"{one.key} ({one.kind} {one})" for one in wanted.ranges)
    return f"search for {wanted.aim}: {wanted.trials} trials by {wanted.sampler} over {over}; folder: {folder}"


def store_of(wanted: SearchPlan, folder: Path, kept: SearchIds) -> TrialStore:
    """The trials of the search in a folder."""
    url = storage_url(wanted.settings.storage, folder)
    return TrialStore(wanted, url, kept.study, kept.search_id, earlier=not kept.owns)


def observers(wanted: SearchPlan, folder: Path, search_id: str, progress: bool) -> list[RunsObserver[Trial]]:
    tracking = first_experiment(wanted).tracking
    found: list[RunsObserver[Trial]] = [SearchProgress(wanted)] if progress else []
    if any(name in WRITERS for name in tracking.names):
        found.append(SearchTracker(wanted, tracking, folder, search_id))
    return found


def conducted(source: TrialSource, executor: Executor, flag: Stop | None = None) -> Found:
    """Run the trials that are left, and notify the observers. flag: that a signal sets, a new one by default."""
    with stopping(flag) as stop, observed(source.observers):
        clean_up_ended(source)
        ended = [trial for trial in source.store.trials() if trial.status != "running"]
        for observer in source.observers:
            observer.begins("trial", source.plan.trials, ended)
        try:
            if source.left and not stop():
                with suppress(Interrupted):  # while Ray starts; told in the next line
                    execute(source, executor, stop)
            if stop():
                raise Interrupted(stop(), left(source))
            if source.broken:
                raise source.broken
            return found(source.plan, source.store, source.folder, source.search_id)
        finally:
            clean_up_ended(source)


def execute(source: TrialSource, executor: Executor, stop: Callable[[], int]) -> None:
    """Run trials until none is left or `stop` returns the number of a signal."""
    threading.Thread(target=import_packages, args=(source.plan,), name="imports", daemon=True).start()
    try:
        executor.start(stop)
    except ConfigError as error:
        raise ConfigError(f"search.workers: a trial does not fit: {error}") from None
    executor.run(source, lambda: stop() or source.broken)


def executor_of(plan: SearchPlan) -> Executor:
    """Executes the trials. Raises ConfigError if they must share processes and cannot."""
    engine, asked = first_experiment(plan).engine, plan.settings
    why_not = why_not_together(engine, asked.workers)
    if not why_not and "seconds" in asked.objectives:
        why_not = "seconds is an objective, and trials that share a process share its time"
    if not check_together("search.together", asked.together, why_not):
        return on_ray(engine, None if asked.concurrent == "auto" else asked.concurrent, asked.workers)
    most = processes_here(engine)
    at_once = plan.at_once(most)
    return Processes(min(most, at_once), at_once)


def first_experiment(plan: SearchPlan) -> Experiment:
    """The experiment with the first value of every range."""
    return plan.experiment(next(corners(plan.ranges)))


def left(source: TrialSource) -> str:
    """How many trials have ended, and how to resume; the end of a message."""
    trials = source.store.trials()
    ended = sum(t.status != "running" for t in trials)
    return f"; {ended} of {source.plan.trials} trials have ended; to go on: fedfleet search --resume {source.folder}"


def try_out(wanted: SearchPlan, folder: Path) -> None:
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

"""Runs a study: first the trials of tuning, then the cells, then the report."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from ...engine.config.schema import Engine, experiment
from ...engine.errors import ConfigError, FedFleetError, Interrupted
from ...engine.records.history import Record
from ...engine.runs.fork import fork_of
from ...engine.runs.run_directory import clear
from ...engine.runs.saved_files import FILE_OF_KIND, refuse_other_kind
from ...engine.state.checkpoint import checkpointed_rounds
from ...engine.stopping import Stop, stopping
from ...engine.storage.expanded import expanded
from ...engine.storage.lock import exclusive
from ...workloads.processors import processors
from ..executor.executor import check_together, on_ray, why_not_together
from ..executor.processes import Processes
from ..executor.source import Executor, RunRequest, RunsObserver, Source, observed, remove_resume_files
from ..files import read_yaml
from ..output_paths import check_out
from ..report.files import import_packages, write_report
from ..search.folder import SAVED
from ..streams import say, tell
from ..study.cells import Cell, cells, trials
from ..study.check import checked
from ..study.data import refuse_other_data, with_files
from ..study.folder import DIVERGED, FAILED, FINISHED, OVER, StudyFolder
from ..study.kept_results import NAME, check_restored, keep, restore
from ..study.searches import searches
from ..study.spec import Study, load
from .observers import StudyProgress, StudyTracker

CELLS_OF_PROCESS = 16
"""The most cells that share a process."""


class Outcome(NamedTuple):
    """Numbers of cells by how they ended, and of trials that failed."""

    finished: int
    diverged: int
    failed: int
    failed_trials: int


class RunGroup(NamedTuple):
    """Runs that do not depend on each other. what: name of a run; planned: returns the runs, when all runs of earlier
    groups have ended."""

    what: str
    planned: Callable[[StudyFolder], list[Cell]]


TRIALS = RunGroup("trial", lambda folder: trials(folder.study))
CELLS = RunGroup("cell", lambda folder: [cell for cell in folder.cells() if cell.fork is None])
FORKS = RunGroup("fork", lambda folder: [cell for cell in folder.cells() if cell.fork is not None])


def run_named(
    source: str,
    overrides: tuple[str, ...],
    reduced: dict[str, Any],
    out: Path | None,
    jobs: int | None,
    keep: bool,
    quiet: bool,
) -> int:
    """Run a study, by name or file; returns the number of cells and trials that failed. keep: whether to keep the
    final models; quiet: whether to show no progress."""
    study = load(source, overrides, reduced)
    folder = out or Path("runs") / "studies" / study.name
    check_out(folder)
    refuse_other_kind(folder, "study")
    refuse_own_file(source, folder)
    if not quiet:
        announce(study, folder)

    ended, text = run_study(study, folder, jobs, keep, quiet)
    say(text)
    counts = f"{ended.finished} cells finished, {ended.diverged} diverged, {ended.failed} failed"
    if ended.failed_trials:
        counts += f"; {ended.failed_trials} trials failed, so the choice of settings lacks them"
    say(f"\n{counts}\nreport: {folder / 'report.html'}, {folder / 'report.md'}")
    return ended.failed + ended.failed_trials


def refuse_own_file(source: str, folder: Path) -> None:
    """Raise ConfigError if the file of a study was written by hand and is the study.yaml of the folder, over which the
    resolved study would be written."""
    file = folder / FILE_OF_KIND["study"]
    if not file.is_file() or not expanded(source).is_file() or not file.samefile(expanded(source)):
        return
    results = any((folder / name).exists() for name in ("cells", NAME))
    if not results and not Study.model_fields.keys() <= read_yaml(file, source).keys():
        raise ConfigError(
            f"--out {folder}: the study would be written over its own file, {file}; choose another folder, or rename "
            "the file"
        )


def announce(study: Study, folder: Path) -> None:
    """Print what will be run."""
    for note in study.notes:
        tell(f"changed: {note}")
    tell(f"{len(cells(study))} cells and {len(trials(study))} trials for tuning; folder: {folder}")


def run_study(
    study: Study, path: Path, jobs: int | None = None, keep_models: bool = False, quiet: bool = False
) -> tuple[Outcome, str]:
    """Run the cells that are not over and write the report; returns the outcome and the report as text.

    path: the study's folder. jobs: number of simultaneous cells; default: the processors that this process may use, or
    as many as fit into the cluster that `experiment.engine.address` names. keep_models: whether to keep the final
    models. quiet: whether to show no progress on standard error. A cell that fails or diverges is recorded, and the
    study continues. Raises ConfigError, before anything runs, for a study that cannot run; Interrupted on a
    signal, after the cells under way have written checkpoints.
    """
    study = with_files(checked(study))
    refuse_other_kind(path, "study")
    folder, engine = StudyFolder(path), Engine.model_validate(cells(study)[0].data["engine"])
    jobs = jobs or (None if engine.address else processors())
    if check_together("tune.together", study.tune.together, why_not_together(engine)):
        executor = Processes(jobs or 1, CELLS_OF_PROCESS * (jobs or 1))
    else:
        executor = on_ray(engine, jobs, share=not engine.address)
    with executor, exclusive(path, ".study.lock"), stopping() as stop:
        folder.keep(study)
        restore(path)
        check_restored(path, study.columns, study.columns_of_trials)
        refuse_other_data(folder, study)
        observers: list[RunsObserver[Cell]] = [] if quiet else [StudyProgress(study, folder)]
        if study.tracking.names:
            observers.append(StudyTracker(study, folder))
        try:
            with observed(observers):
                threading.Thread(target=import_packages, name="imports", daemon=True).start()
                source = Cells(folder, observers, keep_models)
                source.groups.append(TRIALS)
                if any(folder.searched(key) is None for key in searches(study)):
                    execute(executor, source, stop)
                    search_ranges(study, folder, executor, stop, quiet)
                source.groups.extend((CELLS, FORKS))
                execute(executor, source, stop)
                if stop():
                    raise Interrupted(stop())
                remove_parents_states(folder)
                text = write_report(folder)
        except Interrupted as error:  # also one of a search, whose own command would not go on with the study
            how = f"; to go on: give the same command again; {results_so_far(study, folder)}"
            raise Interrupted(error.signal, how) from None
        finally:
            with suppress(OSError):  # the disk is full; the folders of the runs are there
                keep(path, study.columns)
    return outcome(folder), text


def results_so_far(study: Study, folder: StudyFolder) -> str:
    """How to see the results of a study that was interrupted, as the end of a sentence. Its report has cells and trials
    of grids; those of a search that is not over are in a report of its own."""
    told = f"{folder.path} has the results so far, and fedfleet report {folder.path} shows them"
    places = [folder.search_of(key) for key in searches(study) if folder.searched(key) is None]
    begun = [str(place) for place in places if (place / SAVED).is_file()]
    return f"{told}; fedfleet report {begun[0]} shows the trials of a search" if begun else told


def execute(executor: Executor, source: Cells, stop: Stop) -> None:
    """Execute the groups of a source, unless a signal asks to end."""
    if not stop() and source.ready():
        executor.run(source, stop)
    for observer in source.observers:
        observer.pauses()


def search_ranges(study: Study, folder: StudyFolder, executor: Executor, stop: Stop, quiet: bool) -> None:
    """Run the searches that are left, and tell which failed. Raises Interrupted if a signal asks to end while one of
    them has trials left. stop: the study's flag, after which no search begins."""
    from ..search.run import search  # it loads Optuna, which most studies do without

    for key, data in searches(study).items():
        if stop():
            return
        if folder.searched(key) is not None:
            continue
        executor.start(stop)
        place = folder.search_of(key)
        try:
            search(data, place, resume=True, progress=not quiet, executor=executor, stop=stop)
        except (ConfigError, Interrupted):
            raise
        except FedFleetError as error:
            tell(f"search failed: {data['name']}: {error}")


class Cells(Source[Cell]):
    """The source of a study: hands out the cells that are not over, group after group.

    A group begins when all cells of the group before it have ended.
    """

    def __init__(self, folder: StudyFolder, observers: Sequence[RunsObserver[Cell]], keep_models: bool) -> None:
        super().__init__(observers)
        self.folder, self.keep_models = folder, keep_models
        self.groups: deque[RunGroup] = deque()  # that have not begun
        self.waiting: deque[Cell] = deque()

    def ready(self) -> bool:
        """Begin the next groups until one has a cell; returns whether there is one. No cell may be under way."""
        while not self.waiting and self.groups:
            group = self.groups.popleft()
            unique = {cell.key: cell for cell in group.planned(self.folder)}  # equal configurations run once
            old = {key: cell for key, cell in unique.items() if self.folder.status(cell) in OVER}
            for observer in self.observers if unique else ():
                observer.begins(group.what, len(unique), list(old.values()))
            self.waiting.extend(cell for key, cell in unique.items() if key not in old)
        return bool(self.waiting)

    def next(self) -> RunRequest | None:
        while self.waiting or (not self.live and self.ready()):
            cell = self.waiting.popleft()
            self.begin(cell, cell.data["federation"]["rounds"])
            try:
                make_fork(self.folder, cell)
            except (ConfigError, OSError) as error:
                self.end(cell, FAILED, str(error))
                continue
            return RunRequest(cell.key, cell.data, str(self.folder.of(cell).resolve()), keep_model=self.keep_models)
        return None

    @property
    def left(self) -> int:
        return len(self.waiting)

    def reported(self, run: Cell, rows: list[Record]) -> bool:
        return False

    def record_end(self, run: Cell, status: str, reason: str) -> Cell:
        self.folder.note(run, status, reason)
        return run


def make_fork(folder: StudyFolder, cell: Cell) -> None:
    """Make the folder of a cell that is a fork, unless it is there. The executor then resumes it as it resumes any run.

    Raises ConfigError if its parent has not finished, or has not kept the checkpoint.
    """
    place = folder.of(cell)
    if cell.fork is None or (place / "run.json").is_file():
        return
    parent, number = folder.of_key(cell.fork.parent, cell.fork.earlier), cell.fork.round
    if (parent / "result.json").is_file() and number not in checkpointed_rounds(parent):
        raise ConfigError(
            f"the cell that it is a fork of has finished and not kept round {number}; remove {parent}, and the study "
            "runs it again"
        )
    clear(place)
    fork_of(parent, number, experiment(cell.data), place)


def remove_parents_states(folder: StudyFolder) -> None:
    """Remove what the parents of forks have kept, once all cells are over."""
    all_cells = folder.cells()
    if all(folder.status(cell) in OVER for cell in all_cells):
        for cell in all_cells:
            if cell.fork is not None:
                remove_resume_files(folder.of_key(cell.fork.parent, cell.fork.earlier))
                remove_resume_files(folder.of(cell))


def outcome(folder: StudyFolder) -> Outcome:
    """How the cells in a folder have ended."""
    found = [folder.status(cell) for cell in folder.cells()]
    finished, diverged = found.count(FINISHED), found.count(DIVERGED)
    failed_trials = sum(folder.status(cell) == FAILED for cell in trials(folder.study))
    return Outcome(finished, diverged, len(found) - finished - diverged, failed_trials)

"""Runs a study: first the trials that tuning needs, then the cells, then the report."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from ...algorithms.contract import Deferred
from ...engine.config import schedules
from ...engine.config.run_spec import RunSpec
from ...engine.config.schema import Experiment, experiment
from ...engine.errors import ConfigError, Interrupted
from ...engine.planning.execution_plan import without_numbers
from ...engine.rounds.expected_columns import check_column
from ...engine.runs.launch import prepare
from ...engine.stopping import stopping
from ..report.page import write_report
from ..stores import store
from .cells import Cell, grid, levels, planned, trials
from .folder import DIVERGED, FAILED, FINISHED, OVER, Folder, only_study
from .grids import has_ranges, points
from .pool import Pool
from .progress import Progress
from .ranges import check_ranges, run_searches, searches
from .spec import Study
from .track import Tracker


class Outcome(NamedTuple):
    """Cells by how they ended."""

    finished: int
    diverged: int
    failed: int


def run_study(study: Study, path: Path, jobs: int | None = None, keep_models: bool = False) -> tuple[Outcome, str]:
    """Run what is not over yet; how cells ended, and the report as text. The folder's report is up to date afterwards.

    jobs: cells at once, as many as there are processors unless given. A cell that fails or diverges is recorded and the
    study goes on. Raises ConfigError, before anything runs, for what cannot; Interrupted on SIGINT and SIGTERM, with
    what was under way checkpointed where its settings allow that.
    """
    check(study)
    folder, jobs = Folder(path), jobs or os.cpu_count() or 1
    with only_study(path), stopping() as stop:
        folder.keep(study)
        tracker, progress = Tracker(study, folder), Progress(study, folder, jobs)
        pool = Pool(folder, jobs, stop, keep_models)
        ended = "KILLED"
        try:
            wave(pool, progress, "trial", trials(study))
            if not stop():
                searched(study, folder, jobs, pool)
            if not stop():
                wave(pool, progress, "cell", folder.cells(), tracker)
            if stop():
                raise Interrupted(stop(), f"; to go on: give the same command again, {folder.path} has what is done")
            text = write_report(folder)
            ended = "FINISHED"
        finally:
            progress.end()
            pool.close()
            tracker.close(ended)
    return outcome(folder), text


def check(study: Study) -> None:
    """Every name and argument, for each method and level; that the data can be had and the model built, for a level."""
    for place, overrides in levels(study):
        for method in study.methods:
            offered = [*grid(study, method, place, overrides, study.seeds[0])]
            for cell in (offered[0], offered[-1]):
                if not has_ranges(cell.data):
                    resolve(cell)
            if method == next(iter(study.methods)) and not has_ranges(offered[0].data):
                with of_cell(offered[0]):
                    prepare(experiment(offered[0].data), "check", Path("."))
    if study.tracking.uri != "none":
        store(study.tracking.uri)
    check_ranges(study)
    check_metrics(study)


def check_metrics(study: Study) -> None:
    """ConfigError where a column that the study goes by is recorded by none of its methods, for some workload.

    Levels that differ in numbers alone have the same columns, and are tried once.
    """
    wanted = {"report.metric": study.report.metric, "tune.metric": study.deciding}
    by_workload: dict[str, list[Experiment]] = {}
    for _, overrides in levels(study):
        for method in study.methods:
            data = first_values(planned(study, method, overrides, study.seeds[0]))
            kind = json.dumps(without_numbers({"workload": data.get("workload"), "evaluate": data.get("evaluate")}))
            by_workload.setdefault(kind, []).append(experiment(data))
    for experiments in by_workload.values():
        for key, column in {column: key for key, column in reversed(wanted.items())}.items():
            check_column(key, column, experiments[: len(study.methods)])


def first_values(data: dict[str, Any]) -> dict[str, Any]:
    """An experiment with the first value of each grid, and the lower end of each range."""
    if not has_ranges(data):
        return next(points(data))[1]
    from ..search.space import corners, decided, ranges

    return decided(data, next(corners(ranges(data))))


@contextmanager
def of_cell(cell: Cell) -> Iterator[None]:
    """Errors of an experiment name the study's section that it comes from: `methods.LABEL` or `experiment`."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(in_study(str(error), cell)) from error


def in_study(message: str, cell: Cell) -> str:
    at = f" (at {', '.join(cell.place)})" if cell.place else ""
    if re.match(r"method\b", message):
        return f"methods.{cell.method}{message.removeprefix('method')}{at}"
    if re.match(rf"({'|'.join(Experiment.model_fields)})\b", message):
        return f"experiment.{message}{at}"
    return message


def resolve(cell: Cell) -> None:
    """Build the workload's and the method's settings, not the network, which takes a second where it is large."""
    with of_cell(cell):
        built_of(cell)


def built_of(cell: Cell) -> None:
    run_spec = RunSpec.of("check", experiment(cell.data))
    assert run_spec.workload is not None
    spec = schedules.resolve(run_spec.experiment.method, 1, run_spec.experiment.federation.rounds, "method")
    built = run_spec.registry.build("METHODS", spec, "method")
    if isinstance(built, Deferred):
        try:
            built.build(run_spec.context)
        except ValueError as error:
            raise ConfigError(f"method: {error}") from error


def wave(pool: Pool, progress: Progress, what: str, planned: list[Cell], tracker: Tracker | None = None) -> None:
    """Cells that are over are told to the tracker, the others run; equal ones once."""
    unique = list({cell.key: cell for cell in planned}.values())
    old = [cell for cell in unique if pool.folder.status(cell) in OVER]
    if not unique:
        return
    progress.begin(what, len(unique), old)
    over = {cell.key for cell in old}
    try:
        if tracker is not None:
            for cell in planned:
                if cell.key in over:
                    tracker.add(cell)
        for event in pool.run([cell for cell in unique if cell.key not in over]):
            progress.event(event)
            if tracker is not None and event.what in (FINISHED, DIVERGED, FAILED):
                tracker.add(event.cell)
    finally:
        progress.end()


def searched(study: Study, folder: Folder, jobs: int, pool: Pool) -> None:
    if searches(study):
        pool.close()  # their processors are the searches' now
    for failed in run_searches(study, folder, jobs):
        print(f"search failed: {failed}", file=sys.stderr)


def outcome(folder: Folder) -> Outcome:
    found = [folder.status(cell) for cell in folder.cells()]
    finished, diverged = found.count(FINISHED), found.count(DIVERGED)
    return Outcome(finished, diverged, len(found) - finished - diverged)

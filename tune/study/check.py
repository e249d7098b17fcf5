"""Checks a study before anything runs, and finds whether larger or smaller values of its metrics are better."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...algorithms.contract import Deferred
from ...algorithms.tree import Layout
from ...engine.config import schedules
from ...engine.config.differences import fork_changes
from ...engine.config.schema import Experiment, experiment
from ...engine.errors import ConfigError, FedFleetError
from ...engine.planning.execution_plan import without_numbers
from ...engine.records.metrics import better, on_validation, refuse_test_metric
from ...engine.run_spec import RunSpec
from ...engine.runs.expected_columns import check_column
from ...engine.runs.prepare import prepare
from ..tracking.stores import store
from ..tracking.writers import check_names
from ..validation import fraction
from .cells import Cell, cells, first_values, grid, has_ranges, levels, planned, trial_data, trials
from .searches import check_searches, searches
from .spec import Study


def checked(study: Study) -> Study:
    """The study with the directions of its metrics. Raises ConfigError for one that could not run as it is written.

    All names and arguments are resolved for each method and level. The data are loaded and the model is built once for
    each level.
    """
    study = with_direction(study)
    for number, (place, at) in enumerate(levels(study)):
        for method in study.methods:
            offered = [*grid(study, method, place, at, study.seeds[0])]
            for cell in offered if number == 0 else (offered[0], offered[-1]):
                if not has_ranges(cell.data):
                    resolve(cell)
            if method == next(iter(study.methods)) and not has_ranges(offered[0].data):
                with of_cell(offered[0]):
                    prepare(experiment(offered[0].data), "check", Path("."))
    check_names(study.tracking.names)
    if "mlflow" in study.tracking.names:
        store(study.tracking.uri)
    check_searches(study)
    check_metrics(study)
    check_held_out(study)
    check_forks(study)
    return study


def with_direction(study: Study) -> Study:
    """The study with the `report.best` and the direction of what decides that follow from its metrics and its workload,
    unless they are given."""
    if study.directed is not None:
        return study.directed
    metrics = (study.report.metric, study.deciding)
    # Only metrics of the evaluation are the workload's; what a loss is, its name says.
    unknown = any(name.startswith("eval/") and better(name) == "max" for name in metrics)
    lower = lower_of(study) if unknown else ()
    found = study.model_copy(update={"directions": {name: better(name, lower) for name in metrics}})
    return found.directed or found


def lower_of(study: Study) -> tuple[str, ...]:
    """`lower` of the workload at the first level; () for a study that cannot be built, which its check refuses."""
    try:
        data = first_values(planned(study, next(iter(study.methods)), levels(study)[0][1], study.seeds[0]))
        return tuple(RunSpec.of("direction", experiment(data)).workload.lower)
    except (FedFleetError, ValueError):  # of what is read of a table of own files, such as a wrong path
        return ()


def check_forks(study: Study) -> None:
    """Raise ConfigError if a cell cannot be a fork of the cell that the study says."""
    all_cells = cells(study)
    by_key = {cell.key: cell for cell in all_cells}
    for cell in all_cells:
        if cell.fork is not None and cell.seed == study.seeds[0]:
            parent, rounds = by_key[cell.fork.parent], cell.data["federation"]["rounds"]
            with of_cell(cell):
                fork_changes(experiment(parent.data).plain(), experiment(cell.data).plain())
                if cell.fork.round >= rounds:
                    raise ConfigError(
                        f"fork < {rounds} must hold, the number of rounds, got {cell.fork.round}; lower it"
                    )


def check_metrics(study: Study) -> None:
    """Raise ConfigError if, for some workload, no method records a column that the study decides or reports by.

    Levels that differ only in numbers have the same columns and are checked once.
    """
    if study.validation and study.tune.each != "none":
        refuse_test_metric("tune.metric", study.deciding)
    if fraction(study.experiment) and study.report.best_round and on_validation(study.report.metric):
        raise ConfigError(
            f"report.best_round: choices are made on validation rows, got {study.report.metric}; leave it out, or set "
            "report.best_of_test"
        )
    by_workload: dict[str, dict[str, dict[str, Any]]] = {}
    for _, at in levels(study):
        for method in study.methods:
            data = first_values(planned(study, method, at, study.seeds[0]))
            kind = json.dumps(without_numbers({"workload": data.get("workload"), "evaluate": data.get("evaluate")}))
            by_workload.setdefault(kind, {}).setdefault(method, data)
    for found in by_workload.values():
        runs = {method: experiment(data) for method, data in found.items()}
        check_reported(study, runs)
        check_deciding(study, {method: experiment(trial_data(data, study)) for method, data in found.items()})


def check_held_out(study: Study) -> None:
    """Raise ConfigError if trials cannot hold out the rows of `tune.validation`, or would not decide by them.

    The rows are dealt to the clients once for each workload and number of clients.
    """
    if not study.tune.validation or not (trials(study) or searches(study)):
        return
    for method in study.methods:
        if "validation_" not in (deciding := study.deciding_of(method)):
            raise ConfigError(
                f"tune.validation: {deciding} would decide, which is not measured on the rows that are held out, got "
                f"{study.tune.validation}; set tune.metric to a column such as eval/validation_loss, or leave it out"
            )
    dealt = set[str]()
    for place, at in levels(study):
        method = next(iter(study.methods))
        data = trial_data(first_values(planned(study, method, at, study.seeds[0])), study)
        kind = json.dumps([data.get("workload"), data["federation"], data["evaluate"]], sort_keys=True, default=repr)
        if kind in dealt:
            continue
        dealt.add(kind)
        try:
            with of_cell(Cell(method, place, study.seeds[0], {}, data, "")):
                prepare(experiment(data), "check", Path(".")).split()
        except ConfigError as error:
            raise ConfigError(str(error).replace("experiment.evaluate.validation", "tune.validation", 1)) from error


def check_reported(study: Study, runs: dict[str, Experiment]) -> None:
    """Raise ConfigError if no run of one workload, method -> experiment, records a column that is reported."""
    if plain := [one for method, one in runs.items() if method not in study.report.metrics]:
        check_column(study.report.metric, "report.metric", plain)
    for number, column in enumerate(study.report.also):
        check_column(column, f"report.also[{number}]", [*runs.values()])
    for method in runs.keys() & study.report.metrics.keys():
        check_column(study.report_of(method).metric, f"report.metrics.{method}", [runs[method]])


def check_deciding(study: Study, trials: dict[str, Experiment]) -> None:
    """Raise ConfigError if no trial of one workload, method -> experiment, records a column that decides. Columns that
    are reported, too, have been checked."""
    plain = [one for method, one in trials.items() if method not in study.report.metrics]
    if plain and study.deciding != study.report.metric:
        check_column(study.deciding, "tune.metric", plain)
    for method in trials.keys() & study.report.metrics.keys():
        if (column := study.deciding_of(method)) != study.report_of(method).metric:
            check_column(column, f"report.metrics.{method}", [trials[method]])


@contextmanager
def of_cell(cell: Cell) -> Iterator[None]:
    """Let a ConfigError of the experiment name the section of the study: `methods.LABEL` or `experiment`."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(in_study(str(error), cell)) from error


def in_study(message: str, cell: Cell) -> str:
    """The message of an experiment's error with the study's keys and the level."""
    at = f" (at {', '.join(cell.place)})" if cell.place else ""
    if re.match(r"method\b", message):
        return f"methods.{cell.method}{message.removeprefix('method')}{at}"
    if re.match(rf"({'|'.join(Experiment.model_fields)})\b|\S+ is not a key", message):
        return f"experiment.{message}{at}"
    return message


def resolve(cell: Cell) -> None:
    """Build the workload and the method. Raises ConfigError if they cannot be built.

    The model is built only for a method that depends on its shapes, and once for all cells with the same workload.
    """
    with of_cell(cell):
        build_method(cell)


def build_method(cell: Cell) -> None:
    run_spec = RunSpec.of("check", experiment(cell.data))
    assert run_spec.workload is not None
    spec = schedules.resolve(run_spec.experiment.method, 1, run_spec.experiment.federation.rounds, "method", True)
    built = run_spec.registry.build("METHODS", spec, "method")
    if isinstance(built, Deferred):
        try:
            built.build(run_spec.context_with(layout_of(run_spec)))
        except ValueError as error:
            raise ConfigError(f"method: {error}") from error


_layouts: dict[str, Layout] = {}
"""The layouts of the models that cells have needed in this process, by what a layout depends on."""


def layout_of(run_spec: RunSpec) -> Layout:
    """The layout of the run's model, which is built if no cell with the same workload has needed it before."""
    experiment = run_spec.experiment
    key = json.dumps([experiment.workload, list(experiment.plugins), experiment.engine.dtype], default=repr)
    if key not in _layouts:
        _layouts[key] = run_spec.layout
    return _layouts[key]

"""`fedfleet.compare`: a table of finished runs for Python. The command `fedfleet compare` shows `findings.py`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ...engine.config.schema import experiment
from ...engine.errors import ConfigError, first_line
from ...engine.records.history import History
from ...engine.records.metrics import better, default_column, nearest_column
from ...engine.runs.chart import optional
from ...engine.runs.result import Result
from ...engine.runs.saved_files import read_rows, saved_config
from ...engine.storage.expanded import expanded
from ...engine.storage.plain_files import read_text
from ..report.statistics import spread
from ..run_files import same
from .findings import runs_in
from .labels import labels_of, settings_of
from .paired import compare_paired, lacks, rows_of

if TYPE_CHECKING:
    import pandas as pd

Run = Result | str | Path

NO_RUNS = "runs must name a run at least, got none; give results or folders"


def compare(
    runs: Iterable[Run] | Mapping[str, Run],
    metric: str | None = None,
    *,
    lower: bool = False,
    targets: Sequence[float] = (),
    paired: bool = False,
) -> pd.DataFrame:
    """Compare finished runs. Returns a data frame of pandas, with one row for the runs that differ only in the seed.

    runs: results, folders of runs, or folders of studies and searches, of which the finished runs are taken, those of
    tuning too. A folder that is named twice counts once. A mapping, label -> run, gives the rows its labels; otherwise
    a label is the method and the settings in which the runs differ.
    metric: a column of the records (default: eval/accuracy, or of runs whose clients alone have models the accuracy of
    these, eval/own/test_accuracy, or else the first column of the evaluations that all runs have). lower: whether lower
    values are better (default: only if the metric is not named and is a loss). targets: values of the metric to reach.

    The columns are means over the runs of a row: `metric` itself, its last value; `std`, the standard deviation of
    these values (NaN for one run); `best`, the best value of any round; `rounds to T`, the first measured round whose
    value is as good as the target T (NaN if a run never is); `MB up` and `MB down`, the bytes of all clients / 10^6;
    `seconds`, of all rounds. `runs` is the number of runs.

    paired: compare each run with the run of the same seed that has the settings of the first run, on common random
    numbers. The table then has a row for each other setting: `pairs`; `metric`; `difference`, the mean over the pairs;
    `low`, `high` and `p`, its 95 % confidence interval and the p-value of Student's paired t test (NaN for one pair,
    and `p` of pairs that differ equally); `equal rounds`, up to which the runs of all pairs are the same; `models
    apart`, the mean of |x' - x| / |x|. Studies
    and searches keep no models, so their `models apart` is NaN; so is `equal rounds` of a study that was restored from
    cells.jsonl, which has no training losses. To compare the runs of a study with one of them, name that one first:
    [study / "cells" / key, study].

    Raises ConfigError if a run has not finished or has no such column, and if pandas is not installed.
    """
    pandas = optional("pandas", "or use the command fedfleet compare")
    of_runs = labelled(runs)
    if metric is None:
        metric = default_column(*(result.rows.columns for _, result in of_runs))
        lower |= better(metric) == "min"
    if paired:
        found = compare_paired(of_runs, metric)
        return pandas.DataFrame(rows_of(found), index=pandas.Index(found.labels, name="run"))
    rows: dict[str, list[dict[str, float]]] = {}
    for label, result in of_runs:
        rows.setdefault(label, []).append(measures(result, metric, lower, targets))
    table = pandas.DataFrame(
        [
            {"runs": len(group), **{name: np.mean([each[name] for each in group]) for name in group[0]}}
            for group in rows.values()
        ],
        index=pandas.Index(rows, name="run"),
    )
    table.insert(2, "std", [spread([each[metric] for each in group]).std for group in rows.values()])
    return table


def labelled(runs: Iterable[Run] | Mapping[str, Run]) -> list[tuple[str, Result]]:
    """The results with their labels. Runs that differ only in the seed have the same label."""
    if isinstance(runs, Mapping):
        if not runs:
            raise ConfigError(NO_RUNS)
        return [(str(label), result) for label, run in runs.items() for result in results_of(run)]
    if isinstance(runs, Result | str | Path):
        raise ConfigError(f"runs must be a list of results or folders, got {runs!r}; write [{runs!r}]")
    results, folders = [], set()
    for run in runs:
        for result in results_of(run):
            if isinstance(run, Result) or result.directory not in folders:
                results.append(result)
            folders.add(result.directory)
    if not results:
        raise ConfigError(NO_RUNS)
    labels = labels_of([settings_of(result.experiment.plain(), result.directory) for result in results])
    return list(zip(labels, results, strict=True))


def results_of(run: Run) -> list[Result]:
    """The results that a result or a folder stands for."""
    if isinstance(run, Result):
        return [run]
    folder = expanded(run)
    folders = runs_in(folder)
    if folders != [folder]:
        folders = [each for each in folders if (each / "result.json").is_file()]
    if not folders:
        raise ConfigError(f"{folder} holds no run that has finished; resume them first")
    return [load(each) for each in folders]


def load(folder: Path) -> Result:
    """The result of the finished run in a folder. Its model is {} if the folder has none: cells and trials leave none,
    and those that were restored have nothing but a configuration, a record and a result.

    Raises ConfigError if the run has not finished, or if its files are damaged.
    """
    if (folder / "model.safetensors").is_file() or not (folder / "result.json").is_file():
        return Result.load(folder)
    configuration = experiment(saved_config(folder))
    try:
        summary = json.loads(read_text(folder / "result.json"))
        rows = History(read_rows(folder / "rounds.parquet"))
        return Result(summary["run_id"], configuration, rows, {}, summary["total_seconds"], folder.resolve())
    except Exception as error:  # damage shows itself in any kind of error
        raise ConfigError(
            f"{folder}: the result is damaged or incomplete ({first_line(error)}); remove the folder to run it again"
        ) from error


def measures(result: Result, metric: str, lower: bool, targets: Sequence[float]) -> dict[str, float]:
    """The numbers of one run."""
    if lacks(result, metric):
        measured = [name for name in result.rows.columns if name.startswith(("eval/", "train/"))]
        raise ConfigError(f"metric: run {result.run_id} has no column {metric}; {nearest_column(metric, measured)}")
    rounds, (values, measured) = result.rows.column("round")[0], result.rows.column(metric)
    rounds, values = rounds[measured], values[measured]
    found = {metric: float(values[-1]), "best": float(values.min() if lower else values.max())}
    costs = {"rounds": rounds}
    if "system/clock" in result.rows.columns:
        costs["virtual seconds"] = result.rows.column("system/clock")[0][measured]
    for target in targets:
        beyond = values <= target if lower else values >= target
        reached = np.flatnonzero(beyond | same(values, target))
        for name, cost in costs.items():
            found[f"{name} to {target:g}"] = float(cost[reached[0]]) if len(reached) else math.nan
    for name, column in (("MB up", "comm/bytes_up"), ("MB down", "comm/bytes_down")):
        found[name] = float(result.rows.column(column)[0].sum()) / 1e6
    found["seconds"] = result.seconds
    if "system/clock" in result.rows.columns:
        found["virtual seconds"] = float(result.rows.column("system/clock")[0][-1])
    return found

"""The findings of runs, for `fedfleet compare`: its text and its page are those of a report."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...engine.config.schema import part_name
from ...engine.errors import ConfigError
from ...engine.records.metrics import better, default_column, nearest_column
from ..by_client import of_runs
from ..output_paths import check_page
from ..report.files import text, write_page
from ..report.findings import Findings, MeasuredRun, measured
from ..report.tables import tables
from ..run_files import column_names, read_config, same, why_unfinished
from ..study.folder import FINISHED
from ..study.kept_results import restore
from ..study.spec import Report
from ..units import evaluated_rows
from .beside import chosen_columns, shared_settings
from .labels import labels_of, settings_of


def compare_runs(
    folders: Sequence[Path],
    metric: str | None,
    lower: bool,
    targets: Sequence[float],
    html: Path | None,
    columns: Sequence[str] = (),
) -> str:
    """Compare runs; returns the tables as text.

    folders: of runs, studies or searches. metric: a column of rounds.parquet, None for the usual one. lower: whether
    lower values are better. targets: values of the metric to reach. html: file for an HTML page as well, or None.
    columns: further columns of rounds.parquet, or keys of the configuration, for the table of results.
    """
    unique = {folder.resolve(): folder for path in folders for folder in runs_in(path)}
    if metric is None:
        records = [names for folder in unique.values() if (names := column_names(folder))]
        metric = default_column(*records) if records else "eval/accuracy"
        lower |= better(metric) == "min"
    report = Report(metric=metric, best="min" if lower else "max", targets=tuple(targets))
    found = findings_of(list(unique.values()), report, columns)
    if all(run.points is None for run in found.runs):
        measured_columns = [n for n in column_names(next(iter(unique.values()))) if n.startswith(("eval/", "train/"))]
        raise ConfigError(f"--metric: no run has a column {metric}; {nearest_column(metric, measured_columns)}")
    if not targets and found.virtual and (target := shared_target(found)) is not None:
        found = replace(found, report=report.model_copy(update={"targets": (target,)}))
    if html is None:
        return text(found, tables(found))
    return write_page(found, check_page("--html", html))


def shared_target(found: Findings) -> float | None:
    """A round value of the metric that all finished runs reached: that of the worst of them, with two digits. None if
    nothing was measured."""
    larger = found.report.best == "max"
    runs = [run.points.values for run in found.runs if run.points is not None and run.status == FINISHED]
    if not runs:
        return None
    value = min(float(values.max()) for values in runs) if larger else max(float(values.min()) for values in runs)
    if value == 0:
        return value
    digit = 10.0 ** (math.floor(math.log10(abs(value))) - 1)
    whole = round(value / digit)
    if not same(value / digit, whole):
        whole = (math.floor if larger else math.ceil)(value / digit)
    return float(f"{whole * digit:.10g}")


def runs_in(path: Path) -> list[Path]:
    """The folders of runs at a path: the path itself, or all runs in a study's or search's folder."""
    if (path / "config.yaml").is_file():
        return [path]
    if path.is_dir():
        restore(path)
    below = sorted(file.parent for file in path.glob("**/config.yaml")) if path.is_dir() else []
    if not below:
        raise ConfigError(f"{path} holds no run; give folders that `fedfleet run` or `fedfleet study` wrote")
    return below


def findings_of(folders: list[Path], report: Report, columns: Sequence[str]) -> Findings:
    configurations = [read_config(folder) for folder in folders]
    seeds = [data.get("seed", 0) for data in configurations]
    settings = [settings_of(data, folder) for data, folder in zip(configurations, folders, strict=True)]
    labels = apart(labels_of(settings), seeds, folders)
    runs = [run_of(*one, report) for one in zip(folders, labels, seeds, strict=True)]
    title = f"Comparison of runs: {', '.join(common(configurations))}"
    chosen, shared = chosen_columns(columns, labels, folders, configurations), shared_settings(settings)
    methods = list(dict.fromkeys(labels))
    tables = of_runs(dict(zip(folders, zip(labels, seeds, strict=True), strict=True)))
    more = {"columns": chosen, "shared": shared, "by_client": tuple(tables)}
    more["rows"] = evaluated_rows(data.get("workload") for data in configurations)
    return Findings(title.removesuffix(": "), report, methods, [()], runs, **more)


SIZES = {"clients": "{} clients", "cohort": "{} of them in each round", "rounds": "{} rounds"}
"""Size of a federation -> how the title of a comparison has it."""


def common(configurations: Sequence[dict[str, Any]]) -> Iterator[str]:
    """What all runs have in common of the method, the workload and the sizes, as text."""
    for key in ("method", "workload"):
        names = {part_name(data[key]) for data in configurations if key in data}
        if len(names) == 1:
            yield names.pop()
    for key, form in SIZES.items():
        sizes = {data.get("federation", {}).get(key) for data in configurations}
        if len(sizes) == 1 and None not in sizes:
            yield form.format(sizes.pop())


def apart(labels: list[str], seeds: list[int], folders: list[Path]) -> list[str]:
    """The labels, made unique by the folders' names where runs have the same configuration and seed.

    Examples are two versions of a plug-in, or one configuration on two machines. A label that several runs of the same
    seed share gets the folder's name in every run.
    """
    pairs = list(zip(labels, seeds, strict=True))
    shared = {label for label, seed in pairs if pairs.count((label, seed)) > 1}
    short = [folder.name for folder, label in zip(folders, labels, strict=True) if label in shared]
    unique = len(set(short)) == len(short)
    return [
        f"{label} ({folder.name if unique else folder})" if label in shared else label
        for label, folder in zip(labels, folders, strict=True)
    ]


def run_of(folder: Path, label: str, seed: int, report: Report) -> MeasuredRun:
    finished = (folder / "result.json").is_file()
    status = FINISHED if finished else "not finished"
    reason = "" if finished else why_unfinished(folder) or "no result.json"
    return measured(MeasuredRun(label, (), seed, status, reason), folder, report)

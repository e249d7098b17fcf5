"""Comparison of runs. Runs that differ only in the seed form one line, labelled by the settings that set it apart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...engine.config.differences import FREE_KEYS, flatten
from ...engine.config.schema import Federation
from ...engine.errors import ConfigError
from ...engine.records.lineage import lineage_of
from ..output_paths import check_page
from ..report.files import text, write_page
from ..report.findings import Findings, MeasuredRun, measured
from ..report.tables import tables
from ..run_files import column_names, read_config, why_unfinished
from ..study.cells import WITHOUT_EFFECT
from ..study.folder import FINISHED
from ..study.kept_results import restore
from ..study.spec import Report
from .part_defaults import with_defaults


def compare_runs(folders: Sequence[Path], metric: str, lower: bool, targets: Sequence[float], html: Path | None) -> str:
    """Compare runs; returns the tables as text.

    folders: of runs, studies or searches. metric: a column of rounds.parquet. lower: whether lower values are better.
    targets: values of the metric to reach. html: file for an HTML page as well, or None.
    """
    report = Report(metric=metric, best="min" if lower else "max", targets=tuple(targets))
    unique = {folder.resolve(): folder for path in folders for folder in runs_in(path)}
    found = findings_of(list(unique.values()), report)
    if all(run.points is None for run in found.runs):
        known = ", ".join(metrics_of(folders[0])) or "none"
        raise ConfigError(f"--metric: no run has a column {metric}; the first run has {known}")
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
    rounded = (math.floor if larger else math.ceil)(value / digit) * digit
    return float(f"{rounded:.10g}")


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


def metrics_of(path: Path) -> list[str]:
    """The metrics that the first run at a path has measured."""
    return [name for name in column_names(runs_in(path)[0]) if name.startswith(("eval/", "train/"))]


def findings_of(folders: list[Path], report: Report) -> Findings:
    configurations = [settings_of(read_config(folder), folder) for folder in folders]
    labels = labels_of(configurations)
    seeds = [seed_of(folder) for folder in folders]
    labels = apart(labels, seeds, folders)
    runs = [run_of(folder, label, report) for folder, label in zip(folders, labels, strict=True)]
    return Findings("Comparison of runs", report, list(dict.fromkeys(labels)), [()], runs)


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


def seed_of(folder: Path) -> int:
    return read_config(folder).get("seed", 0)


def numeric_settings(data: dict[str, Any]) -> dict[str, Any]:
    """The settings that influence a run's numbers, without the seed, by dotted key."""
    for part in ("workload", "method"):
        if isinstance(data.get(part), str):
            data[part] = {"name": data[part]}
    if isinstance(data.get("federation"), dict) and isinstance(data["federation"].get("pace"), dict):
        data["federation"] = {**data["federation"], "pace": chosen_pace(data["federation"]["pace"])}
    return {
        k: v for k, v in flatten(data).items() if k not in (*FREE_KEYS, "seed") and not k.startswith(WITHOUT_EFFECT)
    }


def chosen_pace(pace: dict[str, Any]) -> dict[str, Any]:
    """The keys of `federation.pace` whose values are not the defaults of its name, since paces of different names have
    different keys."""
    name = pace.get("name", "rounds")
    try:
        defaults = Federation(pace={"name": name}).pace.model_dump()  # pyright: ignore[reportArgumentType]
    except ConfigError:  # of another version
        return pace
    changed = {key: value for key, value in pace.items() if value != defaults.get(key)}
    return changed if name == "rounds" else {"name": name, **changed}


def settings_of(data: dict[str, Any], folder: Path | None) -> dict[str, Any]:
    """`numeric_settings` of the run in a folder, and the round from which it was forked, if it is a fork."""
    lineage = lineage_of(folder)
    return {**numeric_settings(data), **({"fork.round": lineage.round} if lineage else {})}


def labels_of(configurations: list[dict[str, Any]]) -> list[str]:
    """A label for each run: the method's name and the values of all keys in which the runs differ.

    A run that leaves an argument out is labelled by the argument's default.
    """
    written = {key for data in configurations for key in data}
    configurations = with_defaults([named(data, written) for data in configurations])
    keys = sorted({key for data in configurations for key in data})
    differ = [key for key in keys if len({str(data.get(key)) for data in configurations}) > 1]
    return [label_of(data, [key for key in differ if key != "method.name"]) for data in configurations]


def named(data: dict[str, Any], keys: set[str]) -> dict[str, Any]:
    """The settings in which parts that are given by a name alone are written like those with arguments: {"method.rule":
    "sgd"} -> {"method.rule.name": "sgd"}, if some run has this key."""
    return {f"{k}.name" if isinstance(v, str) and f"{k}.name" in keys else k: v for k, v in data.items()}


def label_of(data: dict[str, Any], differ: list[str]) -> str:
    differing = [f"{key_in_label(key)} {data[key]}" for key in differ if key in data]
    return ", ".join([str(data.get("method.name", "method")), *differing])


def key_in_label(key: str) -> str:
    """A key as labels have it."""
    return key.removeprefix("method.").replace("federation.pace.", "pace.").replace("pace.name", "pace")


def run_of(folder: Path, label: str, report: Report) -> MeasuredRun:
    finished = (folder / "result.json").is_file()
    status = FINISHED if finished else "not finished"
    reason = "" if finished else why_unfinished(folder) or "no result.json"
    return measured(MeasuredRun(label, (), seed_of(folder), status, reason), folder, report)

"""cells.jsonl: the results of a study's runs in one small file, from which a study goes on without their folders.

The folders of runs are too large to be passed on or to be kept beside the report: they have a record of every round,
the partition and the log. This file has one line of JSON for each run that is over, with its configuration and what
reports, tuning, comparisons and tracking need of it, and one for each search of ranges that is over. It is written
whenever `fedfleet study` ends; lines whose folders are missing or damaged stay, since the key of a run stands for its
whole configuration. Where the file is there and the folder `cells/` is not, as in a clone of a repository that keeps
results, the folders are made from it again, all of them or none.

A row stands for the rounds since the row before: what is added up over rounds (bytes, seconds, client visits) is added
up over them.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from ...engine.errors import ConfigError
from ...engine.records.client_models import FILE as CLIENTS
from ...engine.records.lineage import FILE as FORK
from ...engine.storage.atomic_write import write
from ...engine.storage.plain_files import read_text
from ...workloads.files.roots import IN_PART
from ..by_client import MODELS, metric_of, of_clients
from ..run_files import (
    ADDED_UP,
    Columns,
    column_names,
    data_in_part,
    parquet,
    privacy_spent,
    read_columns,
    read_json,
)

NAME = "cells.jsonl"
AS_THEY_ARE = ("round", "system/clock")
"""Further columns that are kept, beside the metrics of evaluations."""
LEFT_OUT = re.compile(rf"eval/(unseen/)?{MODELS}/.*_(decile|q\d\d|better|equal|worse)")
"""Matches columns on the spread over clients that are kept only where a study reports or decides by them."""
NEEDED = ("round", "comm/bytes_down", "comm/bytes_up", "time/seconds")
"""The columns that every report reads."""

Line = dict[str, Any]


def keep(folder: Path, metrics: set[str]) -> None:
    """Write the results of all runs and searches of a study that are over. folder: of the study. metrics: the columns
    whose values are all kept, beside those of evaluations."""
    lines = {name_of(line): line for line in valid_lines(folder / NAME)}
    for run in (folder / "cells").glob("*/"):
        also = kept_before(lines.get(f"cells/{run.name}", {}))
        if (line := line_of(run, metrics | also)) is not None:
            lines[name_of(line)] = line
    for search in (folder / "searches").glob("*/"):
        if result := read_json(search / "result.json"):
            line = {"search": search.name, "result": {"best": result.get("best", {})}}
            lines[name_of(line)] = line
    if lines:
        write(folder / NAME, "".join(json.dumps(line) + "\n" for _, line in sorted(lines.items())))


def kept_before(line: Line) -> set[str]:
    """The columns that an earlier line has because another study has reported or decided by them."""
    rows, clients = line.get("rows", {}), line.get("clients", {})
    names = {name for name in rows if name not in (*ADDED_UP, *AS_THEY_ARE) and not is_always_kept(name)}
    if rows and len(rows["round"]) == rows["round"][-1]:
        names |= {name for name in ADDED_UP if name in rows}  # as they are in every round
    return names | {metric for name in clients if of_clients(metric := metric_of(name)) is not None}


def is_always_kept(name: str) -> bool:
    """Whether a column is kept also where no study reports or decides by it, beside ADDED_UP and AS_THEY_ARE."""
    return name.startswith("eval/") and not LEFT_OUT.fullmatch(name)


def name_of(line: Line) -> str:
    """The folder that a line stands for, in the study's folder."""
    return f"searches/{line['search']}" if "search" in line else f"cells/{line['key']}"


def line_of(run: Path, metrics: set[str]) -> Line | None:
    """What is kept of a run; None if it is not over, or if one of its files cannot be read."""
    result, failure = read_json(run / "result.json"), read_json(run / "failure.json")
    if not result and failure.get("status") != "diverged":
        return None
    try:
        part = data_in_part(run)
        return {
            "key": run.name,
            "config": config_of(run),
            "result": result_of(result),
            "failure": failure,
            "environment": read_json(run / "environment.json"),
            "privacy": privacy_spent(run),
            **fork_of(run),
            **({"in_part": part} if part else {}),
            **clients_of(run, metrics),
            "rows": rows_of(read_columns(run), metrics),
        }
    except (ConfigError, ValueError, OSError, yaml.YAMLError):
        return None


def result_of(result: dict[str, Any]) -> dict[str, Any]:
    """The content of a run's result.json, without its folder and the last values of columns that are left out."""
    kept = {name: value for name, value in result.items() if name != "directory"}
    if isinstance(metrics := kept.get("metrics"), dict):
        kept["metrics"] = {name: value for name, value in metrics.items() if not LEFT_OUT.fullmatch(name)}
    return kept


def fork_of(run: Path) -> dict[str, Any]:
    """What is kept of the run that this one is a fork of, with the name of its folder alone; {} of others."""
    fork = read_json(run / FORK)
    return {"fork": {**fork, "folder": Path(str(fork.get("folder"))).name}} if fork else {}


def clients_of(run: Path, metrics: set[str]) -> dict[str, Any]:
    """What is kept of what clients' own models reach: the digest of the split, and the columns of clients.parquet that
    the metrics are of; {} if they are of none."""
    table = parquet(run / CLIENTS)
    if table is None:
        return {}
    names: list[str] = table.column_names
    wanted = {of.column for metric in metrics if (of := of_clients(metric)) is not None}
    kept = [name for name in names if name in wanted and "_validation_" not in name]  # means choose settings
    if not kept:
        return {}
    others = [name for name in names if name in ("client", "population") or name.startswith("rows_")]
    columns = {name: [rounded(value) for value in table[name].to_pylist()] for name in (*others, *kept)}
    return {"split": read_json(run / "partition.json").get("sha256", ""), "clients": columns}


def rounded(value: Any) -> Any:
    """A cell of a table as it is written; texts and missing values as they are."""
    return number(value) if isinstance(value, int | float) else value


def config_of(run: Path) -> str:
    """A run's configuration, in which plug-ins have no folders, for these are of one machine; "" if it has none."""
    file = run / "config.yaml"
    text = read_text(file) if file.is_file() else ""
    data = yaml.safe_load(text)
    if not isinstance(data, dict) or not data.get("plugins"):
        return text
    named = [Path(name).name if name.endswith(".py") else name for name in data["plugins"]]
    return yaml.safe_dump({**data, "plugins": named}, sort_keys=False)


def rows_of(columns: Columns, metrics: set[str]) -> dict[str, list[float | None]]:
    """Column -> its values in the rows that are kept: those with a metric, and the last one. None: not measured."""
    if not columns or not len(columns["round"]):
        return {}
    measured = [name for name in columns if name in metrics or is_always_kept(name)]
    wanted = np.isfinite(np.array([columns[name] for name in measured])).any(0) if measured else np.zeros(1, bool)
    places = np.union1d(np.flatnonzero(wanted), len(columns["round"]) - 1)
    kept = {
        name: columns[name][places] for name in (*AS_THEY_ARE, *measured) if name in columns and name not in ADDED_UP
    }
    for name in ADDED_UP:
        if name in columns:
            kept[name] = np.diff(np.nancumsum(columns[name])[places], prepend=0.0)
    return {name: [number(value) for value in values.tolist()] for name, values in kept.items()}


def number(value: float) -> float | int | None:
    """A number as it is written: twelve digits, whole numbers without a point, None for NaN."""
    if not np.isfinite(value):
        return None if np.isnan(value) else value
    if value == int(value) and abs(value) < 2**53:  # larger ones may have no float64 that is equal to them
        return int(value)
    return float(f"{value:.12g}")


def restore(folder: Path) -> int:
    """Make the folders of the runs and searches in cells.jsonl, unless the study's folder has `cells/`; returns how
    many were made.

    Raises ConfigError if the file is damaged, or if the folder cannot be written to. Then no folder is made.
    """
    file, cells = folder / NAME, folder / "cells"
    if not file.is_file() or (cells.exists() and any(cells.iterdir())):
        return 0
    lines = read_lines(file)
    try:
        with TemporaryDirectory(prefix=".restored.", dir=folder) as place:
            for line in lines:
                restore_line(Path(place) / name_of(line), line)
            if (Path(place) / "searches").exists() and not (folder / "searches").exists():
                os.rename(Path(place) / "searches", folder / "searches")
            if (
                Path(place) / "cells"
            ).exists():  # the study counts as restored as soon as it has them, so they come last
                os.rename(Path(place) / "cells", cells)
    except OSError as error:
        if cells.exists() and any(cells.iterdir()):
            return 0  # another process has restored it in the meantime
        raise ConfigError(
            f"{folder}: its results cannot be restored from {NAME} ({error.strerror or error}); make room, or copy the "
            "folder to a place that can be written to"
        ) from None
    return len(lines)


def valid_lines(file: Path) -> list[Line]:
    """The lines of a file that has been read before; without those that cannot be read, and [] without a file."""
    if not file.is_file():
        return []
    texts = file.read_text("utf-8", "replace").splitlines()
    return [line for line in map(parsed, texts) if line is not None]


def read_lines(file: Path) -> list[Line]:
    """All lines. Raises ConfigError if one is damaged, or stands for the same run as another one."""
    remedy = "restore the file, or remove it to run all cells again"
    lines, names = [], set[str]()
    for place, text in enumerate(file.read_text("utf-8", "replace").splitlines(), 1):
        line = parsed(text)
        if line is None or name_of(line) in names:
            what = "damaged" if line is None else "the same run as another one"
            raise ConfigError(f"{file}: line {place} is {what}; {remedy}")
        names.add(name_of(line))
        lines.append(line)
    return lines


def parsed(text: str) -> Line | None:
    """A line of the file; None if it is damaged."""
    try:
        line = json.loads(text)
        if "search" in line:
            return line if line["search"].isalnum() and isinstance(line["result"]["best"], dict) else None
        mappings, texts = ("result", "failure", "environment", "rows"), ("config", "privacy")
        good = line["key"].isalnum() and all(isinstance(line[part], dict) for part in mappings)
        good = good and all(isinstance(line[part], str) for part in texts)
        good = good and isinstance(line.get("in_part", ""), str) and isinstance(line.get("split", ""), str)
        good = good and isinstance(line.get("fork", {}), dict) and are_columns(line.get("clients", {}))
        good = good and all(map(are_numbers, line["rows"].values()))
        good = good and len({len(values) for values in line["rows"].values()}) <= 1
        good = good and (not line["rows"] or set(NEEDED) <= set(line["rows"]))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return line if good else None


def are_numbers(values: Any) -> bool:
    """Whether it is a list of numbers, with None for missing ones."""
    return isinstance(values, list) and all(v is None or type(v) in (int, float) for v in values)


def are_columns(columns: Any) -> bool:
    """Whether it is a mapping of lists of equal length, of numbers, or of texts in the column population."""
    return (
        isinstance(columns, dict)
        and all(isinstance(values, list) for values in columns.values())
        and len({len(values) for values in columns.values()}) <= 1
        and all(are_numbers(values) for name, values in columns.items() if name != "population")
        and all(isinstance(value, str) for value in columns.get("population", ()))
    )


def restore_line(place: Path, line: Line) -> None:
    """Make the folder of a run or a search from its line."""
    place.mkdir(parents=True)
    if line.get("rows"):
        pq.write_table(
            pa.table({n: arrow_column(values) for n, values in line["rows"].items()}), place / "rounds.parquet"
        )
    if line.get("clients"):
        columns = {n: values if n == "population" else arrow_column(values) for n, values in line["clients"].items()}
        pq.write_table(pa.table(columns), place / CLIENTS)
        write(place / "partition.json", json.dumps({"sha256": line.get("split", "")}) + "\n")
    if line.get("config"):
        write(place / "config.yaml", line["config"])
    log = [f"restored privacy: {line['privacy']} (spent)\n"] if line.get("privacy") else []
    log += [f"restored {IN_PART}{line['in_part']}\n"] if line.get("in_part") else []
    if log:
        write(place / "run.log", "".join(log))
    if line.get("fork"):
        write(place / FORK, json.dumps(line["fork"]) + "\n")
    for name in ("environment", "failure", "result"):  # a run is over as soon as its result is there, so it comes last
        if line.get(name):
            write(place / f"{name}.json", json.dumps(line[name]) + "\n")


def arrow_column(values: list[float | None]) -> Any:
    """An Arrow array of whole numbers, or of float64 where a number is missing or has a fraction."""
    if all(isinstance(value, int) for value in values):
        return pa.array(values, pa.int64())
    return pa.array([None if value is None else float(value) for value in values], pa.float64())


def is_restored(run: Path) -> bool:
    """Whether the folder of a finished run was made from its line."""
    return (run / "result.json").is_file() and not (run / "run.json").is_file()  # which every run has at first


def check_restored(folder: Path, metrics: Iterable[str], of_trials: Collection[str] = ()) -> None:
    """Raise ConfigError if no run that was restored has kept one of these columns. Some runs may lack one: methods may
    be reported by other columns.

    Only the columns that a study reports or decides by have all their values in cells.jsonl. of_trials: those of the
    columns that only runs with rows for validation need; they are not missed where no such run was restored.
    """
    names = set[str]()
    for run in (folder / "cells").glob("*/"):
        if is_restored(run):
            names |= set(column_names(run))
    if not any("validation_" in name for name in names):
        metrics = [metric for metric in metrics if metric not in of_trials]
    for metric in metrics if names else ():
        if metric not in names:
            had = ", ".join(sorted(name for name in names if name.startswith("eval/"))) or "none"
            raise ConfigError(
                f"report.metric, report.also or tune.metric: {NAME} in {folder} has not kept {metric} (kept: {had}); "
                "choose one of these, or run the study in another folder"
            )

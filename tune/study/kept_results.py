"""cells.jsonl: the results of a study's runs in one small file, from which a study goes on without their folders.

The folders of runs are too large to be passed on or to be kept beside the report: they have a record of every round,
the partition and the log. This file has one line of JSON for each run that is over, with its configuration and what
reports, tuning, comparisons and tracking need of it. It is written whenever `fedfleet study` ends. Where the file is
there and the folder `cells/` is not, as in a clone of a repository that keeps results, the folders are made from it
again.

A row stands for the rounds since the row before: what is added up over rounds (bytes, seconds, client visits) is added
up over them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from ...engine.errors import ConfigError
from ...engine.storage.atomic_write import write
from ..run_files import Columns, privacy_spent, read_columns, read_json

NAME = "cells.jsonl"
ADDED_UP = ("comm/bytes_down", "comm/bytes_up", "time/seconds", "client/count")
"""Columns of rounds.parquet that are added up over the rounds of a row."""
AS_THEY_ARE = ("round", "system/clock")
"""Further columns that are kept, beside the metrics of evaluations."""


def keep(folder: Path, metrics: set[str]) -> None:
    """Write the results of all runs of a study that are over. folder: of the study. metrics: the columns whose values
    are all kept, beside those of evaluations."""
    lines = [line for run in sorted((folder / "cells").glob("*/")) if (line := line_of(run, metrics)) is not None]
    if lines:
        write(folder / NAME, "".join(json.dumps(line) + "\n" for line in lines))


def line_of(run: Path, metrics: set[str]) -> dict[str, Any] | None:
    """What is kept of a run; None if it is not over."""
    result, failure = read_json(run / "result.json"), read_json(run / "failure.json")
    if not result and failure.get("status") != "diverged":
        return None
    config = run / "config.yaml"
    return {
        "key": run.name,
        "config": config.read_text("utf-8") if config.is_file() else "",
        "result": {name: value for name, value in result.items() if name != "directory"},
        "failure": failure,
        "environment": read_json(run / "environment.json"),
        "privacy": privacy_spent(run),
        "rows": rows_of(read_columns(run), metrics),
    }


def rows_of(columns: Columns, metrics: set[str]) -> dict[str, list[float | None]]:
    """Column -> its values in the rows that are kept: those with a metric, and the last one. None: not measured."""
    if not columns or not len(columns["round"]):
        return {}
    measured = [name for name in columns if name.startswith("eval/") or name in metrics]
    wanted = np.isfinite(np.array([columns[name] for name in measured])).any(0) if measured else np.zeros(1, bool)
    places = np.union1d(np.flatnonzero(wanted), len(columns["round"]) - 1)
    kept = {name: columns[name][places] for name in (*AS_THEY_ARE, *measured) if name in columns}
    for name in ADDED_UP:
        if name in columns:
            kept[name] = np.diff(np.nancumsum(columns[name])[places], prepend=0.0)
    return {name: [number(value) for value in values.tolist()] for name, values in kept.items()}


def number(value: float) -> float | int | None:
    """A number as it is written: whole numbers without a point, None for NaN."""
    if not np.isfinite(value):
        return None if np.isnan(value) else value
    return int(value) if value == int(value) else round(value, 9)


def restore(folder: Path) -> int:
    """Make the folders of the runs in cells.jsonl, unless the study's folder has `cells/`; returns how many were made.

    Raises ConfigError if the file is damaged.
    """
    file = folder / NAME
    if (folder / "cells").exists() or not file.is_file():
        return 0
    made = [checked(file, place, text) for place, text in enumerate(file.read_text("utf-8").splitlines(), 1)]
    for line in made:
        restore_run(folder / "cells" / line["key"], line)
    return len(made)


def checked(file: Path, place: int, text: str) -> dict[str, Any]:
    """A line of the file. place: its number, for the message."""
    try:
        line = json.loads(text)
        mappings, texts = ("result", "failure", "environment", "rows"), ("config", "privacy")
        good = line["key"].isalnum() and all(isinstance(line[part], dict) for part in mappings)
        good = good and all(isinstance(line[part], str) for part in texts)
        good = good and len({len(rows) for rows in line["rows"].values()}) <= 1
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        good = False
    if not good:
        raise ConfigError(f"{file} is damaged in line {place}; restore the file, or remove it to run all cells again")
    return line


def restore_run(run: Path, line: dict[str, Any]) -> None:
    """Make the folder of a run from its line."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    run.mkdir(parents=True)
    if line["rows"]:
        whole = {name: all(isinstance(value, int) for value in values) for name, values in line["rows"].items()}
        kept = {
            name: pa.array(values, pa.int64() if whole[name] else pa.float64()) for name, values in line["rows"].items()
        }
        pq.write_table(pa.table(kept), run / "rounds.parquet")
    if line["config"]:
        write(run / "config.yaml", line["config"])
    if line["privacy"]:
        write(run / "run.log", f"restored privacy: {line['privacy']} (spent)\n")
    for name in ("environment", "failure", "result"):  # a run is over as soon as its result is there, so it comes last
        if line[name]:
            write(run / f"{name}.json", json.dumps(line[name]) + "\n")

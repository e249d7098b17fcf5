"""Reading the files in the folder of a run that every report needs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ..engine.errors import ConfigError, type_and_first_line
from ..engine.runs.saved_files import saved_config
from ..engine.storage.plain_files import read_text, unusual_kind
from ..workloads.files.roots import IN_PART

ADDED_UP = ("comm/bytes_down", "comm/bytes_up", "time/seconds", "client/count", "client/gradients")
"""Columns of rounds.parquet that are sums over rounds where a row stands for several of them, as in a run that was
restored from cells.jsonl."""

Columns = dict[str, np.ndarray]
"""Column of rounds.parquet -> (R,) float64, nan where it was not measured."""


def read_config(run: Path) -> dict[str, Any]:
    """The configuration in a run's folder, which another version may have written. Raises ConfigError if the file, or
    a value that reports need, is damaged."""
    found = saved_config(run)
    for key, kind, wanted in (("seed", int, "a whole number"), ("federation", dict, "a mapping of keys")):
        if key in found and not isinstance(found[key], kind):
            raise ConfigError(
                f"{run / 'config.yaml'} is damaged ({key} must be {wanted}, got {found[key]!r}); put the run's "
                "configuration back"
            )
    return found


def read_columns(run: Path) -> Columns:
    """The columns of rounds.parquet in a run's folder, {} if it has no such file. Raises ConfigError if it is
    damaged."""
    table = read_table(run)
    return {} if table is None else {name: column(table, name) for name in table.column_names}


def parquet(path: Path) -> Any:
    """A Parquet file in a run's folder as an Arrow table, None without one. Raises ConfigError if it is damaged."""
    try:
        return pq.read_table(path) if path.is_file() and not unusual_kind(path) else None
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(
            f"{path} is damaged ({type_and_first_line(error)}); remove the folder {path.parent} to run it again"
        ) from None


def read_table(run: Path) -> Any:
    """rounds.parquet in a run's folder as an Arrow table, None if there is no such file. Raises ConfigError if it is
    damaged."""
    path = run / "rounds.parquet"
    table = parquet(path)
    last, rounds = last_round(table), read_json(run / "result.json").get("rounds")
    if table is not None and rounds is not None and last != rounds:
        raise ConfigError(
            f"{path} is damaged (it ends with round {last} of {rounds}); remove the folder {run} to run it again"
        )
    return table


def last_round(table: Any) -> int:
    """The last round of a record, 0 if it has none."""
    if table is None or not table.num_rows or "round" not in table.column_names:
        return 0
    return int(table.column("round")[-1].as_py())


def column_names(run: Path) -> list[str]:
    """The names of the columns of rounds.parquet that were measured, [] without such a file."""
    table = read_table(run)
    return [] if table is None else [name for name in table.column_names if has_measured(table, name)]


def has_measured(table: Any, name: str) -> bool:
    """Whether a record, an Arrow table, has a column with values of single rounds, and no sums over several ones."""
    return name in table.column_names and not (name in ADDED_UP and table.num_rows < last_round(table))


def column(table: Any, name: str) -> np.ndarray:
    """A column of an Arrow table, (R,) in float64; missing values are nan."""
    return np.array(table.column(name).to_numpy(zero_copy_only=False), dtype=np.float64)


def same(a: Any, b: Any) -> Any:
    """Whether values agree in the twelve digits which a study keeps of them (`study.kept_results.number`): some of the
    runs may have been read from what was kept, and others not. a, b: numbers, or arrays of one shape."""
    return np.isclose(a, b, rtol=1e-11, atol=0)


def privacy_spent(run: Path) -> str:
    """What the rounds of a private run cost, as its log says in one line; "" for a run without privacy."""
    found = next((text for text in reversed(log_texts(run)) if text.startswith("privacy: ") and "(spent" in text), "")
    return found.removeprefix("privacy: ").removesuffix(" (spent)")


def data_in_part(run: Path) -> str:
    """Which part of a published data set a run had, as its log says in one line; "" if it had all of it."""
    return next((text.removeprefix(IN_PART) for text in log_texts(run) if text.startswith(IN_PART)), "")


def versions_of(run: Path) -> str:
    """The versions of the packages that a run was made with, in one line; "" if its folder does not say them."""
    environment = read_json(run / "environment.json")
    packages = environment.get("packages", {})
    known = [f"{name} {packages[name]}" for name in ("fedfleet", "torch") if name in packages]
    python = f"Python {environment.get('python', 'of a version that is not known')}"
    return ", ".join([*known, python]) if known else ""


def why_unfinished(run: Path) -> str:
    """Why a run's folder has no result, from failure.json or the last such line of the log; "" if neither says it."""
    if reason := read_json(run / "failure.json").get("reason"):
        return str(reason)
    last = next((text for text in reversed(log_texts(run)) if text.startswith(("failed: ", "stopped: "))), "")
    return re.sub(r"^failed: (\w+: )?", "", last)


def log_texts(run: Path) -> list[str]:
    """The lines of run.log without their times; [] if it cannot be read."""
    try:
        return [line.partition(" ")[2] for line in read_text(run / "run.log", errors="replace").splitlines()]
    except OSError:
        return []


def read_json(path: Path) -> dict[str, Any]:
    """The mapping in a JSON file, or {} if it cannot be read."""
    try:
        found = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}

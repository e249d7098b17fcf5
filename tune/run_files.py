"""Reading the files in the folder of a run that every report needs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np

Columns = dict[str, np.ndarray]
"""Column of rounds.parquet -> (R,) float64, nan where it was not measured."""


def read_columns(run: Path) -> Columns:
    """The columns of rounds.parquet in a run's folder, {} if it has no such file."""
    import pyarrow.parquet as pq

    path = run / "rounds.parquet"
    if not path.is_file():
        return {}
    table = pq.read_table(path)
    return {name: column(table, name) for name in table.column_names}


def column(table: Any, name: str) -> np.ndarray:
    """A column of an Arrow table, (R,) in float64; missing values are nan."""
    return np.array(table.column(name).to_numpy(zero_copy_only=False), dtype=np.float64)


def privacy_spent(run: Path) -> str:
    """What the rounds of a private run cost, as its log says in one line; "" for a run without privacy."""
    log = run / "run.log"
    lines = log.read_text("utf-8", "replace").splitlines() if log.is_file() else []
    texts = [line.partition(" ")[2] for line in lines]
    found = next((text for text in reversed(texts) if text.startswith("privacy: ") and "(spent" in text), "")
    return found.removeprefix("privacy: ").removesuffix(" (spent)")


def why_unfinished(run: Path) -> str:
    """Why a run's folder has no result, from failure.json or the last such line of the log; "" if neither says it."""
    if reason := read_json(run / "failure.json").get("reason"):
        return str(reason)
    log = run / "run.log"
    lines = log.read_text("utf-8", "replace").splitlines() if log.is_file() else []
    texts = [line.partition(" ")[2] for line in lines]
    last = next((text for text in reversed(texts) if text.startswith(("failed: ", "stopped: "))), "")
    return re.sub(r"^failed: (\w+: )?", "", last)


def read_json(path: Path) -> dict[str, Any]:
    """The mapping in a JSON file, or {} if it cannot be read."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}

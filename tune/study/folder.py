"""A study's folder: study.yaml, cells/<key>/ with one run each, report.html, report.md, charts/.

A cell is over when it has a result.json, or a failure.json that says why it has none. Nothing else is remembered.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from ...engine.errors import ConfigError
from ...engine.storage.atomic_write import write
from .cells import Cell, cells
from .spec import Study, load

FINISHED, DIVERGED, FAILED, MISSING = "finished", "diverged", "failed", "missing"
OVER = (FINISHED, DIVERGED)
"""Not run again; a cell that failed is, by the next `fedfleet study`."""


class Points(NamedTuple):
    """A run's evaluations: rounds (E,), values of the metric (E,), and up to then bytes (E,) and seconds (E,)."""

    rounds: np.ndarray
    values: np.ndarray
    sent: np.ndarray
    seconds: np.ndarray


class Folder:
    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def study(self) -> Study:
        if not (self.path / "study.yaml").is_file():
            raise ConfigError(f"{self.path} holds no study; give the folder that `fedfleet study` wrote")
        return load(str(self.path / "study.yaml"))

    def keep(self, study: Study) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        write(self.path / "study.yaml", yaml.safe_dump(study.model_dump(mode="json"), sort_keys=False))

    def of(self, cell: Cell) -> Path:
        return self.path / "cells" / cell.key

    def status(self, cell: Cell) -> str:
        place = self.of(cell)
        if (place / "result.json").is_file():
            return FINISHED
        return self.failure(cell).get("status", FAILED) if (place / "failure.json").is_file() else MISSING

    def failure(self, cell: Cell) -> dict[str, Any]:
        """Status and reason of a cell that has no result."""
        return read_json(self.of(cell) / "failure.json")

    def note(self, cell: Cell, status: str, reason: str) -> None:
        """Record that a cell diverged or failed, or that one which had failed has finished."""
        place = self.of(cell)
        if status == FINISHED:
            (place / "failure.json").unlink(missing_ok=True)
            return
        with suppress(OSError):  # a full disk: the study counts the cell as missing
            place.mkdir(parents=True, exist_ok=True)
            write(place / "failure.json", json.dumps({"status": status, "reason": reason}) + "\n")

    def result(self, cell: Cell) -> dict[str, Any]:
        return read_json(self.of(cell) / "result.json")

    def points(self, cell: Cell, metric: str) -> Points | None:
        """Of the rounds in which the metric was measured; None where it never was."""
        return points_of(self.of(cell), metric)

    def final(self, cell: Cell, metric: str, last: int) -> float:
        """Mean over the last evaluations of a finished cell; nan for any other."""
        if self.status(cell) != FINISHED:
            return float("nan")
        points = self.points(cell, metric)
        return float(points.values[-last:].mean()) if points is not None else float("nan")

    def cells(self) -> list[Cell]:
        """The study's runs with the settings that tuning chose."""
        from .ranges import with_searched_values

        study = self.study
        return [with_searched_values(cell, study, self) for cell in cells(study, lambda cell: self.score(cell, study))]

    def search_of(self, key: str) -> Path:
        return self.path / "searches" / key

    def searched(self, key: str) -> dict[str, Any] | None:
        """The best values by dotted key, of a search that is over."""
        return read_json(self.search_of(key) / "result.json").get("best", {}).get("params")

    def score(self, cell: Cell, study: Study) -> float:
        value = self.final(cell, study.deciding, study.tune.last)
        if not np.isfinite(value):
            return -float("inf")
        return value if study.report.best == "max" else -value


def points_of(run: Path, metric: str) -> Points | None:
    """The same for any run's folder."""
    import pyarrow.parquet as pq

    if not (run / "rounds.parquet").is_file():
        return None
    table = pq.read_table(run / "rounds.parquet")
    if metric not in table.column_names:
        return None
    values = column(table, metric)
    there = np.isfinite(values)
    sent = np.cumsum(column(table, "comm/bytes_down") + column(table, "comm/bytes_up"))
    rounds, seconds = column(table, "round"), np.cumsum(column(table, "time/seconds"))
    return Points(rounds[there], values[there], sent[there], seconds[there]) if there.any() else None


def column(table: Any, name: str) -> np.ndarray:
    return np.array(table.column(name).to_numpy(zero_copy_only=False), dtype=np.float64)


def read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}

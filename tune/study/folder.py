"""A study's folder: study.yaml, cells/<key>/ with one run each, report.html, report.md, charts/.

A cell is over when its folder has a result.json, or a failure.json with the reason that it has none. There is no other
record of a study's progress, but for a folder without cells/ (see `kept_results`).
"""

from __future__ import annotations

import json
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from ...engine.runs.saved_files import require_kind
from ...engine.storage.atomic_write import write
from ...engine.storage.secrets import redacted_data
from ..run_files import column, has_measured, read_json, read_table
from .cells import Cell, cells
from .searches import with_searched_values
from .spec import Report, Study, Tune, load

FINISHED, DIVERGED, FAILED, MISSING = "finished", "diverged", "failed", "missing"
OVER = (FINISHED, DIVERGED)
"""Status of cells that are not run again. The next `fedfleet study` tries failed cells again."""
MOST_READ = 1000
"""The largest number of cells whose evaluations are kept in memory."""


class Points(NamedTuple):
    """A run's evaluations: rounds (E,), values of the metric (E,), and the bytes (E,) and seconds (E,) until then.
    `clock`, `visits`: (E,) the virtual clock, and the number of client visits until then; None for a run without a
    virtual clock."""

    rounds: np.ndarray
    values: np.ndarray
    sent: np.ndarray
    seconds: np.ndarray
    clock: np.ndarray | None = None
    visits: np.ndarray | None = None


class StudyFolder:
    """The folder of a study at `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # Those of finished cells, for which tuning, tracking and the report ask again.
        self._kept_points = lru_cache(MOST_READ)(points_of)

    @property
    def study(self) -> Study:
        """The study that the folder holds, with the directions of its metrics, which a file that was written by hand
        may leave out; ConfigError if it holds none."""
        require_kind(self.path, "study")
        study = load(str(self.path / "study.yaml"))
        if study.directed is not None:
            return study.directed
        from .check import with_direction  # which imports what builds a workload

        return with_direction(study)

    def keep(self, study: Study) -> None:
        """Write study.yaml. Secrets stay in it, for the study is continued from it."""
        self.path.mkdir(parents=True, exist_ok=True)
        data = study.plain()
        write(self.path / "study.yaml", yaml.safe_dump(data, sort_keys=False), private=redacted_data(data) != data)

    def of(self, cell: Cell) -> Path:
        """The folder of a cell's run."""
        return self.of_key(cell.key, cell.earlier)

    def of_key(self, key: str, earlier: tuple[str, ...] = ()) -> Path:
        """The folder of a run: that of its key, or the first one there of keys that earlier versions gave it."""
        places = [self.path / "cells" / name for name in (key, *earlier)]
        return next((place for place in places if place.exists()), places[0])

    def status(self, cell: Cell) -> str:
        """FINISHED, DIVERGED, FAILED or MISSING."""
        place = self.of(cell)
        if self.result(cell):
            return FINISHED
        return self.failure(cell).get("status", FAILED) if (place / "failure.json").is_file() else MISSING

    def failure(self, cell: Cell) -> dict[str, Any]:
        """`status` and `reason` of a cell that has no result, or {}."""
        return read_json(self.of(cell) / "failure.json")

    def note(self, cell: Cell, status: str, reason: str) -> None:
        """Record that a cell diverged or failed; a cell that finished loses its failure.json."""
        place = self.of(cell)
        if status == FINISHED:
            (place / "failure.json").unlink(missing_ok=True)
            return
        with suppress(OSError):  # the disk is full: the cell then counts as missing
            place.mkdir(parents=True, exist_ok=True)
            write(place / "failure.json", json.dumps({"status": status, "reason": reason}) + "\n")

    def result(self, cell: Cell) -> dict[str, Any]:
        """The content of result.json, or {}."""
        return read_json(self.of(cell) / "result.json")

    def points(self, cell: Cell, metric: str) -> Points | None:
        """The evaluations of a metric; None if it was never measured."""
        if self.status(cell) == FINISHED:
            return self._kept_points(self.of(cell), metric)
        return points_of(self.of(cell), metric)

    def final(self, cell: Cell, metric: str, by: Report | Tune) -> float:
        """The value of a finished cell, as one of the study's sections defines it; nan for any other cell."""
        if self.status(cell) != FINISHED:
            return float("nan")
        points = self.points(cell, metric)
        return by.final(points.values) if points is not None else float("nan")

    def cells(self) -> list[Cell]:
        """The study's runs, with the settings that tuning has chosen."""
        study = self.study
        return [
            with_searched_values(cell, study, self.searched)
            for cell in cells(study, lambda cell: self.score(cell, study))
        ]

    def search_of(self, key: str) -> Path:
        """The folder of a search. key: as in `searches.searches`."""
        return self.path / "searches" / key

    def searched(self, key: str) -> dict[str, Any] | None:
        """Dotted key -> best value of a search; None if the search is not over."""
        return read_json(self.search_of(key) / "result.json").get("best", {}).get("params")

    def score(self, cell: Cell, study: Study) -> float:
        """A trial's value for tuning; see `cells.Score`."""
        value = self.final(cell, study.deciding_of(cell.method), study.tune)
        if not np.isfinite(value):
            return -float("inf")
        return value if study.deciding_best == "max" else -value


def points_of(run: Path, metric: str) -> Points | None:
    """The evaluations of a metric in any run's folder; None if it was never measured. Raises ConfigError if its record
    is damaged."""
    return points_in(read_table(run), metric)


def points_in(table: Any, metric: str) -> Points | None:
    """The evaluations of a metric in a run's record, as `read_table` returns it; None if it was never measured."""
    if table is None or not has_measured(table, metric):
        return None
    values = column(table, metric)
    there = np.isfinite(values)
    sent = np.cumsum(column(table, "comm/bytes_down") + column(table, "comm/bytes_up"))
    rounds, seconds = column(table, "round"), np.cumsum(column(table, "time/seconds"))
    virtual = ()
    if "system/clock" in table.column_names:
        virtual = (column(table, "system/clock")[there], np.cumsum(column(table, "client/count"))[there])
    return Points(rounds[there], values[there], sent[there], seconds[there], *virtual) if there.any() else None

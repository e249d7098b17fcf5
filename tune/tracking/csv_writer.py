"""Writes CSV files: `rounds.csv` in the folder of a run, with a line for each round as soon as it is over.

A search or a study has such a file for each of its runs, and a search one with the objectives of its trials, in the
folder `csv`. A cell is empty where a round has not measured the column.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ...engine.storage.atomic_write import write
from ...engine.storage.plain_files import read_text
from .folder_writer import FolderWriter, append
from .writer import TOP, Batch, End


class CsvWriter(FolderWriter):
    """Writes CSV files."""

    tracker = "CSV"

    def __init__(self, folder: Path, what: str) -> None:
        """folder: of the run, search or study. what: run, search or study."""
        self.columns: dict[str, list[str]] = {}  # key -> the columns of its file so far
        super().__init__(folder, what, "" if what == "run" else "csv")

    def load(self) -> None:
        """Nothing: the standard library writes CSV."""

    def write_records(self, batch: Batch) -> None:
        """Append the records; the file is written anew if they have columns that it does not have."""
        key, trials = batch.key, self.has_trials(batch.key)
        step = "trial" if trials else "round"
        records: list[dict[str, Any]] = [
            {step: int(record["round"]), **{name: value for name, value in record.items() if name != "round"}}
            for _, record in batch.records
            if trials or record["round"]  # the objectives of a trial, which have no round, are in the search's file
        ]
        if not records:
            return
        known, place = self.columns.get(key, []), self.folder / f"{self._stem(key)}.csv"
        columns = list(dict.fromkeys([*known, *(name for record in records for name in record)]))
        if known == columns:
            append(place, text_of(columns, records, head=False))
        else:
            before = rows_in(place) if known or trials else []
            columns = list(dict.fromkeys([*(name for row in before[:1] for name in row), *columns]))
            write(place, text_of(columns, [*before, *records]))
        self.columns[key] = columns

    def finish(self, end: End) -> None:
        """Nothing: all lines are there."""

    def _stem(self, key: str) -> str:
        if key != TOP:
            return self.name_of(key)
        return "rounds" if self.what == "run" else self.what


def rows_in(place: Path) -> list[dict[str, Any]]:
    """The lines of a file, [] if there is none."""
    if not place.is_file():
        return []
    return list(csv.DictReader(io.StringIO(read_text(place))))


def text_of(columns: list[str], rows: Iterable[Any], head: bool = True) -> str:
    """Rows as CSV. head: whether the names of the columns come first."""
    out = io.StringIO()
    made = csv.DictWriter(out, columns, restval="", lineterminator="\n")
    if head:
        made.writeheader()
    made.writerows(rows)
    return out.getvalue()

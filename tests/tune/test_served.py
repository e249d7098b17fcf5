"""What clients are served with, in the report of a study."""

from __future__ import annotations

import math
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fedfleet.engine.records.client_models import FILE
from fedfleet.engine.storage.atomic_write import write
from fedfleet.tune.report.served import Row, Served, clients_of, shares, spread_table, worse_off

SPREAD = (0.5, 0.5, 0.1, 0.4, math.nan, 2000.0)


def of(values: dict[int, float], split: str = "s") -> Served:
    return Served(*SPREAD, split, values)


def test_shares_are_strict_and_over_pairs_with_the_same_split():
    base = [of({0: 0.5, 1: 0.5, 2: 0.5}), of({0: 0.0}), of({0: 0.0}, "")]
    other = [of({0: 0.6, 1: 0.5, 3: 1.0}), of({0: 1.0}, "another"), of({0: 1.0}, "")]
    parts, difference, pairs = shares(base, other, "max")
    assert (parts, pairs) == ([0.5, 0.5, 0.0], 2)
    assert difference == pytest.approx(0.05, abs=1e-15)
    assert shares(base, other, "min")[0] == [0.0, 0.5, 0.5]


def test_tables():
    """A method is compared with each of `against` but itself, at its level and with its seeds."""
    rows = [
        Row("A", "Local", {0: of({0: 0.25, 1: 0.5}), 1: of({0: 0.5})}),
        Row("A", "Ditto", {0: of({0: 0.75, 1: 0.25})}),
        Row("B", "Ditto", {0: of({0: 0.75})}),
    ]
    made = worse_off(rows, ["Local"], "max", 100.0, "Accuracy")
    assert [[cell.text for cell in row] for row in made.rows] == [
        ["A", "Local", "Ditto", "50.0%", "0.0%", "50.0%", "+12.5", "2"]
    ]
    spread = [[cell.text for cell in row] for row in spread_table(rows, 100.0, "Accuracy").rows]
    assert spread[0] == ["A", "Local", "50", "50", "10", "40", "–", "2000"]


def test_clients_that_are_never_trained_with_are_not_compared(tmp_path: Path):
    columns = {"client": [0, 1, 2], "population": ["seen", "seen", "unseen"], "own_test_accuracy": [0.5, None, 1.0]}
    pq.write_table(pa.table(columns), tmp_path / FILE)
    write(tmp_path / "partition.json", "{}")
    assert clients_of(tmp_path, "own_test_accuracy") == {0: 0.5}
    assert clients_of(tmp_path, "adapted_test_accuracy") == {}

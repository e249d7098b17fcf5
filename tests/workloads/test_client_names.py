"""The names of the natural clients of a table."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from fedfleet.engine.workload.split import natural_names
from fedfleet.workloads.data.table import Table
from fedfleet.workloads.partitions.natural import Natural
from fedfleet.workloads.partitions.standard import Iid

NAMES = [["10", "9", "Zoë", "9"][row % 4] for row in range(24)]


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Table:
    monkeypatch.setenv("FEDFLEET_CACHE", str(tmp_path / "cache"))
    columns = {"x": [float(row) for row in range(24)], "label": [row % 2 for row in range(24)], "client": NAMES}
    parquet.write_table(pa.table(columns), tmp_path / "table.parquet")
    given = {"path": str(tmp_path / "table.parquet"), "label": "label", "test_fraction": 0.25}
    return Table(**given, input="x", client="client", partition=Natural())


def test_clients_have_the_names_of_the_table(table: Table):
    """Also where the table comes from the cache. Of a client whose rows are of several there is none."""
    for workload in (table, replace(table)):
        train, index = workload.load()[0], workload.split(0, 3).client_index
        assert workload.client_names() == ("10", "9", "Zoë")
        firsts = train["client"][index.rows[index.offsets[:-1]]]
        assert natural_names(index, workload) == [("10", "9", "Zoë")[number] for number in firsts]
    assert not natural_names(replace(table, partition=Iid()).split(0, 3).client_index, table)


def test_without_names_clients_have_their_numbers(table: Table, tmp_path: Path):
    """A cache of an earlier version has none."""
    index = table.split(0, 3).client_index
    for file in (tmp_path / "cache" / "table-facts").glob("*-clients.json"):
        file.unlink()
    assert sorted(natural_names(index, table)) == ["0", "1", "2"]

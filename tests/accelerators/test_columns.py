"""Where batches are gathered from changes no bit: columns that are resident, chunks of a task, single batches."""

from __future__ import annotations

import pytest
import torch

from fedfleet.engine.accelerators.columns import DeviceColumns, byte_count
from fedfleet.engine.api import run
from fedfleet.engine.clients import worker

from ..faults.runs import same
from ..test_conformance import few

COLUMNS = {"input": torch.arange(40.0).view(10, 4), "label": torch.arange(10)}
ROWS = torch.tensor([[[3, 1], [7, 3]], [[9, 9], [0, 1]]])
CPU = torch.device("cpu")
ALL, SIX, NONE = byte_count(COLUMNS), byte_count(COLUMNS) * 6 // 10, 8


@pytest.mark.parametrize(("budget", "rows"), [(None, 10), (ALL, 10), (SIX, 5), (NONE, 10)])
def test_batches_are_the_same(budget, rows):
    """5 of the 10 rows are in the batches."""
    columns, places = DeviceColumns(COLUMNS, CPU, budget).place(ROWS)
    assert {len(column) for column in columns.values()} == {rows}
    for name, column in COLUMNS.items():
        assert torch.equal(columns[name][places], column[ROWS])


@pytest.mark.parametrize("way", ["chunk", "batch"])
def test_a_run_is_the_same(way, monkeypatch):
    whole = run(few("scaffold"))
    monkeypatch.setattr(worker, "row_budget", lambda device: 60 * 64 * 4 if way == "chunk" else 8)
    placed: list[int] = []
    place = DeviceColumns.place

    def noted(self, rows):
        found = place(self, rows)
        placed.append(len(found[0]["label"]))
        assert self.resident is None
        return found

    monkeypatch.setattr(DeviceColumns, "place", noted)
    same(run(few("scaffold")), whole)
    assert (max(placed) < 60) == (way == "chunk")

"""The parts of a round's time: in the record they add up to the workers' time, and each part has the work that it is
named after."""

from __future__ import annotations

import time

import pytest

from fedfleet.engine import run
from fedfleet.engine.clients import worker

from .setups import STEPS, digits

PARTS = ("state", "data", "reduce", "compute")
PAUSE = 0.02  # seconds, much more than everything else in such a small round takes


def spin() -> None:
    """Use the processor for PAUSE seconds, in place of real work."""
    end = time.perf_counter() + PAUSE
    while time.perf_counter() < end:
        pass


@pytest.mark.parametrize("block", [1, 4])
def test_parts_are_the_workers_time(block):
    result = run(digits("scaffold", STEPS, block=block))
    for row in result.rows:
        assert all(row[f"time/{part}"] > 0 for part in PARTS)
        assert sum(row[f"time/{part}"] for part in PARTS) == pytest.approx(row["time/workers"])
        assert row["time/workers"] + row["time/wait"] == pytest.approx(row["time/train"])  # one worker
        assert 0 < row["time/sum"] <= row["time/wait"]
        assert row["time/train"] + row["time/server"] + row.get("time/evaluate", 0) <= row["time/seconds"]
    assert [int(row["round"]) for row in result.rows if "time/evaluate" in row] == [2, 3]
    assert [name for name in result.rows[-1] if name.startswith("eval/")] == ["eval/loss", "eval/accuracy"]


@pytest.mark.parametrize("block", [1, 4])
@pytest.mark.parametrize(("part", "name"), [("data", "stream"), ("reduce", "Accumulator._note")])
def test_what_takes_longer_shows_where_it_belongs(part, name, block, monkeypatch):
    target, attribute = (worker, name) if "." not in name else (worker.Accumulator, name.partition(".")[2])
    real, calls = getattr(target, attribute), []

    def slow(*args, **more):
        calls.append(1)
        spin()
        return real(*args, **more)

    monkeypatch.setattr(target, attribute, slow)
    (row,) = run(digits("fedavg", STEPS, rounds=1, block=block)).rows
    assert row[f"time/{part}"] >= len(calls) * PAUSE


@pytest.mark.long
def test_two_workers_wait_together(ray_here):
    for row in run(digits("fedavg", STEPS, backend="ray", workers=2)).rows:
        assert row["time/workers"] + row["time/wait"] == pytest.approx(2 * row["time/train"])

"""Rows of client states that stay in the memory of the worker's device, with the processor as the device: no bit
depends on it, whatever happens to the run."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedfleet
from fedfleet.engine import resume, run
from fedfleet.engine.config.schema import experiment
from fedfleet.engine.errors import DeviceLost, Interrupted
from fedfleet.engine.state.checkpoint import checkpoints_in

from ..faults.runs import CLIENTS, Watch, asynchronous, cohort_of, interrupt, plan, row_at, rule, same, setting, small

ALL = 1.0
EVERY = {"every": 2, "keep": 9}


def some(rows: int, method: str = "scaffold") -> float:
    """The GiB in which so many rows fit."""
    return (rows + 0.5) * row_at(Path("/tmp"), 0, method)[2] / 2**30


SIZES = [pytest.param(ALL, id="all", marks=pytest.mark.long), pytest.param(some(13), id="some")]


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The run whose rows are all in files, and its folder."""
    folder = tmp_path_factory.mktemp("files")
    return run(small(folder / "none", checkpoint=EVERY), folder / "out"), folder / "out"


def digests_of(out: Path) -> np.ndarray:
    """(N, 16) the digests of the clients' rows in the newest checkpoint."""
    store = checkpoints_in(out)
    return store.read(store.rounds()[-1]).digest


@pytest.mark.parametrize("gib", SIZES)
def test_rows_in_memory_are_those_in_files(gib, expected, tmp_path):
    """The model, the records, and the digests that a checkpoint has of every row."""
    same(run(small(tmp_path / "none", checkpoint=EVERY, state_memory=gib), tmp_path / "out"), expected[0])
    np.testing.assert_array_equal(digests_of(tmp_path / "out"), digests_of(expected[1]))


@pytest.mark.long
@pytest.mark.parametrize("more", [{"vectorise": False}, {"block": 1}, {"state_dtype": "bfloat16"}], ids=str)
@pytest.mark.parametrize("method", ["fedmuon_bc", "adam", "fed_nsgda_m"])
def test_states_of_all_forms(method, more, tmp_path):
    """Matrices, several leaves, counts; clients alone; rounded rows."""
    found = [run(small(tmp_path, method, state_memory=gib, **more)) for gib in (0, ALL, some(13, method))]
    same(found[1], found[0])
    same(found[2], found[0])


@pytest.mark.parametrize("gib", SIZES)
def test_a_resumed_run_has_the_same_bits(gib, expected, tmp_path):
    """The files have all rows of a checkpoint, which are verified when it is read. The resumed run has them there."""
    with pytest.raises(Interrupted):
        run(small(tmp_path, checkpoint=EVERY, state_memory=gib), tmp_path / "out", [Watch(r3=interrupt)])
    same(resume(tmp_path / "out"), expected[0])


def killed(data: dict[str, Any], out: str) -> None:
    run(experiment(data), out, [Watch(r5=lambda: os.kill(os.getpid(), signal.SIGKILL))])


@pytest.mark.long
def test_a_killed_run_goes_on_from_its_checkpoint(expected, tmp_path):
    """The rows of the rounds since then are gone with the process."""
    given = setting(tmp_path, checkpoint=EVERY, state_memory=ALL), str(tmp_path / "out")
    process = multiprocessing.get_context("spawn").Process(target=killed, args=given)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    same(resume(tmp_path / "out"), expected[0])


@pytest.mark.long
def test_forks_find_the_rows_in_files(expected, tmp_path):
    kept = small(tmp_path, checkpoint={"every": 1, "keep": 9}, keep_state=True, state_memory=ALL)
    run(kept, tmp_path / "parent")
    same(fedfleet.fork(tmp_path / "parent", 3, out=tmp_path / "fork"), expected[0])


@pytest.mark.long
def test_a_client_that_is_dropped_keeps_its_row(tmp_path):
    """The attempts that failed have written to fresh rows alone."""
    found = []
    for gib in (0.0, ALL):
        folder = tmp_path / str(gib)
        plan(folder, rule(int(cohort_of(2)[3]), "raise"))
        found.append(run(small(folder, on_failure="drop", state_memory=gib)))
    same(found[1], found[0])


@pytest.mark.long
def test_an_asynchronous_run(tmp_path):
    found = [run(experiment(asynchronous(tmp_path, 4, state_memory=gib))) for gib in (0, some(13))]
    same(found[1], found[0])


@pytest.mark.long
def test_rows_leave_where_a_block_needs_their_memory(expected, tmp_path):
    """A task that finds no memory is run again without them, with blocks as large as before."""
    plan(tmp_path, rule(2, "card", 20, 1))
    watch = Watch()
    same(run(small(tmp_path, checkpoint=EVERY, state_memory=ALL), tmp_path / "out", [watch]), expected[0])
    assert any("CUDA out of memory" in text for text in watch.told)
    assert not any("clients instead of" in text for text in watch.told)
    np.testing.assert_array_equal(digests_of(tmp_path / "out"), digests_of(expected[1]))


def test_rows_are_lost_with_their_device(expected, tmp_path, monkeypatch):
    """The run says so, and goes on from the checkpoint before."""
    from fedfleet.engine.state import resident_rows

    def lost(*given: Any) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    watch = Watch(r5=lambda: monkeypatch.setattr(resident_rows, "to_device", lost))
    with pytest.raises(DeviceLost, match="cpu failed under this process"):
        run(small(tmp_path, checkpoint=EVERY, state_memory=ALL), tmp_path / "out", [watch])
    assert any("round 5: no checkpoint can be written (client states were lost with cpu" in text for text in watch.told)
    monkeypatch.undo()
    same(resume(tmp_path / "out"), expected[0])


def test_a_row_is_read_where_it_is(tmp_path):
    """Rows on the device, rows beyond its budget, and clients on their first visits, in one block."""
    from fedfleet.engine.state.resident_rows import ResidentRows
    from fedfleet.engine.state.row_files import RowFiles
    from fedfleet.engine.state.row_table import RowTable

    sample = (torch.zeros(3, 2), torch.zeros((), dtype=torch.int64))
    table = RowTable(sample, CLIENTS, 4, str(tmp_path / "state"), digests=True)
    files = RowFiles(table.layout, sample)
    kept = ResidentRows(files, table.capacity, torch.device("cpu"), lambda: 5 * table.width)
    states = (torch.arange(8.0).view(8, 1, 1).expand(8, 3, 2), torch.arange(8))
    told = kept.write(torch.arange(8), states)
    assert not told[:5].any()
    assert told[5:].any(1).all()
    first_visit = (torch.full((3, 2), 9.0), torch.tensor(9))
    vectors, counts = kept.read(torch.tensor([7, -1, 0, 5, 4]), first_visit)
    assert counts.tolist() == [7, 9, 0, 5, 4]
    assert (vectors == counts.view(-1, 1, 1)).all()
    assert [int(kept.read_one(row)[1]) for row in (2, 6)] == [2, 6]
    positions, digests = kept.write_back(np.array([6, 3, 1]))
    np.testing.assert_array_equal(positions, [1, 2])
    np.testing.assert_array_equal(digests, files.digests(np.array([3, 1])))
    assert int(files.read_one(3)[1]) == 3
    assert len(kept.write_back(np.array([6, 3, 1]))[0]) == 0  # nothing is written twice
    kept.leave()
    assert [int(files.read_one(row)[1]) for row in (0, 4)] == [0, 4]
    assert len(kept.write_back(np.arange(8))[0]) == 3  # rows that were written without a word to the table
    table.remove()

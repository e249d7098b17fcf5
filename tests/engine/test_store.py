from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
import xxhash

from fedfleet.engine.state.row_files import RowFiles, locate, paths, positions_by_file, skip_bytes
from fedfleet.engine.state.row_table import RowTable


class State(NamedTuple):
    vector: torch.Tensor
    count: torch.Tensor


SAMPLE = State(torch.zeros(3, 2), torch.zeros((), dtype=torch.int64))


@pytest.fixture
def table(tmp_path):
    table = RowTable(SAMPLE, 10, 4, str(tmp_path / "state"), digests=True)
    yield table
    table.remove()


def write(table: RowTable, clients: list[int], value: int) -> None:
    rows = RowFiles(table.layout, SAMPLE)
    _, fresh = table.reserve(np.array(clients))
    states = State(torch.full((len(clients), 3, 2), float(value)), torch.full((len(clients),), value))
    rows.write(torch.from_numpy(fresh), states)


def read(table: RowTable, client: int) -> int:
    rows = RowFiles(table.layout, SAMPLE)
    state = rows.read(torch.tensor([int(table.row[client])]), SAMPLE)
    assert (state.vector == state.count).all()
    return int(state.count)


def test_a_round_that_is_given_up_leaves_what_was_committed(table):
    write(table, [1, 2], 7)
    table.commit()
    write(table, [2, 3], 8)
    table.abort()
    assert read(table, 1) == read(table, 2) == 7
    assert table.row[3] == -1


def test_rows_are_reused_and_never_outgrow_the_file(table):
    for value in range(50):
        write(table, [value % 10, (value + 1) % 10, (value + 5) % 10, (value + 7) % 10], value)
        table.commit()
        assert read(table, (value + 7) % 10) == value
    assert table.used <= table.capacity
    rows = table.row.tolist()
    assert len(set(rows)) == 10
    assert not set(rows) & set(table.free)


def test_the_file_is_sparse_and_goes_away(tmp_path):
    big = RowTable((torch.zeros(1_000_000),), 1000, 10, str(tmp_path / "state"))
    files = list(Path(big.layout.folder).iterdir())
    assert sum(f.stat().st_size for f in files) == 4 * 1_000_000 * 1010
    assert sum(f.stat().st_blocks * 512 for f in files) < 1_000_000
    big.remove()
    assert not list(tmp_path.iterdir())


def test_a_stateless_method_has_no_store():
    table = RowTable((), 10, 4)
    assert table.layout.folder == ""
    table.reserve(np.array([1, 2]))
    table.commit()


@pytest.mark.parametrize("bfloat16", [False, True])
def test_what_is_written_is_read(tmp_path, bfloat16):
    """States with scalars, empty leaves, whole numbers and floats, in any order of rows, are read by another object on
    the same files. Scalars keep all digits: a count has more than the 8 bits of bfloat16."""
    whole_numbers = (torch.zeros((), dtype=torch.int64), torch.zeros(0), torch.zeros(5, dtype=torch.bool))
    sample = (torch.zeros(2, 3), *whole_numbers, torch.zeros(()))
    table = RowTable(sample, 6, 0, str(tmp_path / "state"), bfloat16, digests=True)
    order = torch.tensor([4, 0, 3])
    count = torch.tensor([255.0, 257.0, 1001.0])
    states = (torch.randn(3, 3, 2).mT, torch.arange(3), torch.zeros(3, 0), torch.rand(3, 5) > 0.5, count)
    told = RowFiles(table.layout, sample).write(order, states)
    other = RowFiles(table.layout, sample)
    floats, *whole = other.read(order.flip(0), sample)
    kept = states[0].to(torch.bfloat16).to(torch.float32) if bfloat16 else states[0]
    assert (floats == kept.flip(0)).all()
    assert all((found == leaf.flip(0)).all() for found, leaf in zip(whole, states[1:], strict=True))
    one = b"".join(
        leaf[1].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        for leaf in (states[0].to(torch.bfloat16) if bfloat16 else states[0], *states[1:])
        if leaf[1].numel()
    )
    assert other.digests(np.array([0])).tobytes() == told[1].tobytes() == xxhash.xxh3_128_digest(one)
    assert (other.digests(order.numpy()) == told).all()


@pytest.mark.parametrize("bfloat16", [False, True])
def test_a_client_alone_has_the_row_of_one_in_a_block(tmp_path, bfloat16):
    sample = (torch.zeros(2, 3), torch.zeros((), dtype=torch.int64), torch.zeros(0), torch.zeros(5, dtype=torch.bool))
    table = RowTable(sample, 6, 0, str(tmp_path / "state"), bfloat16, digests=True)
    rows = RowFiles(table.layout, sample)
    states = (torch.randn(3, 3, 2).mT, torch.arange(3), torch.zeros(3, 0), torch.rand(3, 5) > 0.5)
    told = rows.write(torch.tensor([0, 1, 2]), states)
    for client in range(3):
        mine = tuple(leaf[client] for leaf in states)
        assert (rows.write_one(3 + client, mine) == told[client]).all()
        for row in (client, 3 + client):
            alone, block = rows.read_one(row), rows.read(torch.tensor([row]), sample)
            assert all(torch.equal(one, leaf[0]) for one, leaf in zip(alone, block, strict=True))
            assert all(one.dtype == leaf.dtype for one, leaf in zip(alone, sample, strict=True))


def test_a_file_that_ends_is_told(table):
    rows = RowFiles(table.layout, SAMPLE)
    for path in paths(table.layout.folder):
        Path(path).write_bytes(b"")
    with pytest.raises(OSError, match="row 3 of"):
        rows.read(torch.tensor([3]), SAMPLE)


def test_a_row_on_a_first_visit_is_the_fresh_state_unrounded(tmp_path):
    table = RowTable((torch.zeros(3),), 4, 0, str(tmp_path / "state"), bfloat16=True)
    rows, fresh = RowFiles(table.layout, (torch.zeros(3),)), (torch.tensor([1 / 3, 2 / 3, 1.0]),)
    rows.write(torch.tensor([2]), (torch.full((1, 3), 0.5),))
    (states,) = rows.read(torch.tensor([-1, 2, -1]), fresh)
    assert torch.equal(states, torch.stack([fresh[0], torch.full((3,), 0.5), fresh[0]]))


@pytest.mark.parametrize("rows", [range(0), range(5), range(3, 50), range(17, 18), range(16, 32)])
def test_every_row_has_a_place_of_its_own_and_runs_are_whole(rows):
    places = [(number, at) for number, inside in positions_by_file(rows) for at in inside]
    assert sorted(places) == sorted(map(locate, rows))
    assert len(set(places)) == len(rows)


@pytest.mark.parametrize("moved", range(7))
def test_what_is_left_after_a_short_transfer(moved):
    left = skip_bytes([memoryview(b"ab"), memoryview(b""), memoryview(b"cdef")], moved)
    assert b"".join(left) == b"abcdef"[moved:]
    assert all(len(part) for part in left)

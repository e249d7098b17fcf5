"""The board: what is put on it is read from it, made there or copied there, by whoever has it open."""

from __future__ import annotations

import numpy as np
import pytest

from fedfleet.engine.board import Board, Spec

SPECS = (Spec((5, 3), "<f8"), Spec((), "<f8"))


@pytest.fixture
def board():
    made = Board.make(1000, sum(spec.bytes for spec in SPECS), 4096, 4)
    yield made
    made.close()


def arrays(value: float) -> list[np.ndarray]:
    return [np.arange(15.0).reshape(5, 3) + value, np.array(value)]


@pytest.mark.parametrize("there", [False, True], ids=["copied", "made there"])
def test_results_are_read_as_they_were_put(board, there):
    other = Board(board.address)
    board.open(range(4))
    for slot in (2, 0):
        assert other.claim([slot], host=7) == 0
        assert board.claimed_by(slot) == 7
        assert board.get(slot) is None
        result = arrays(slot)
        if there:
            room = other.room(slot, SPECS)
            for view, array in zip(room, result, strict=True):
                view[...] = array
            result = room
        other.put(slot, {"slot": slot}, result)
    for slot in (0, 2):
        reply, found = board.get(slot)
        assert reply == {"slot": slot}
        assert all(np.array_equal(a, b) for a, b in zip(found, arrays(slot), strict=True))
    assert board.claim([0, 1, 2, 3], host=8) == 1


def test_one_array_made_there_and_one_from_elsewhere(board):
    first, second = board.room(1, SPECS)
    first[...] = arrays(3.0)[0]
    second[...] = -1.0
    board.put(1, (), [first, np.array(3.0)])
    assert board.get(1)[1][1] == 3.0


def test_what_is_broadcast_is_a_copy(board):
    specs = board.post(arrays(1.0))
    other = Board(board.address)
    read = other.posted(specs)
    board.post(arrays(2.0))
    assert read[1] == 1.0
    assert other.posted(specs)[1] == 2.0


def test_a_reply_too_long_is_told(board):
    with pytest.raises(ValueError, match="must fit in 4096 bytes"):
        board.put(0, "x" * 5000, [])

"""Shared memory: every process that opens it reads what was put into it, whether it was created there or copied
there."""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from fedfleet.engine.backends.ray.shared_memory import SharedMemory, Spec

SPECS = (Spec((5, 3), "<f8"), Spec((), "<f8"))


@pytest.fixture
def memory():
    made = SharedMemory.make(1000, sum(spec.bytes for spec in SPECS), 4096, 4)
    yield made
    made.close()


def arrays(value: float) -> list[np.ndarray]:
    return [np.arange(15.0).reshape(5, 3) + value, np.array(value)]


@pytest.mark.parametrize("there", [False, True], ids=["copied", "made there"])
def test_results_are_read_as_they_were_put(memory, there):
    other = SharedMemory(memory.address)
    memory.open(range(4), order=0)
    for slot in (2, 0):
        assert other.claim([slot], order=0, worker=7) == 0
        assert memory.claimed_by(slot) == 7
        assert memory.get(slot) is None
        result = arrays(slot)
        if there:
            views = other.space(slot, SPECS)
            for view, array in zip(views, result, strict=True):
                view[...] = array
            result = views
        other.put(slot, {"slot": slot}, result)
    for slot in (0, 2):
        reply, found = memory.get(slot)
        assert reply == {"slot": slot}
        assert all(np.array_equal(a, b) for a, b in zip(found, arrays(slot), strict=True))
    assert memory.claim([0, 1, 2, 3], order=0, worker=8) == 1


def test_one_array_made_there_and_one_from_elsewhere(memory):
    first, second = memory.space(1, SPECS)
    first[...] = arrays(3.0)[0]
    second[...] = -1.0
    memory.put(1, (), [first, np.array(3.0)])
    assert memory.get(1)[1][1] == 3.0


def test_what_is_broadcast_is_seen(memory):
    specs = memory.post(arrays(1.0))
    other = SharedMemory(memory.address)
    assert other.posted(specs)[1] == 1.0
    memory.post(arrays(2.0))
    assert other.posted(specs)[1] == 2.0


def test_only_changes_of_the_broadcast_are_written(memory):
    before = arrays(1.0)
    memory.post(before[:1])
    before[0][...] = 5.0  # the same array: it counts as written
    specs = memory.post_changes([before[0], np.array(3.0)], before[:1])
    first, second = SharedMemory(memory.address).posted(specs)
    np.testing.assert_array_equal(first, arrays(1.0)[0])
    assert second == 3.0


def test_a_reply_too_long_is_told(memory):
    with pytest.raises(ValueError, match="must fit in 4096 bytes"):
        memory.put(0, "x" * 5000, [])


def test_a_task_that_is_withdrawn_is_not_claimed(memory):
    memory.open(range(3), order=4)
    assert memory.claim([0, 1, 2], order=4, worker=5) == 0
    memory.withdraw([0, 1], order=4)
    assert memory.claimed_by(0) == 5  # it goes on
    assert memory.claim([0, 1, 2], order=4, worker=6) == 2
    assert memory.claim([0, 1, 2], order=4, worker=6) is None
    assert memory.get(1) is None


def test_a_slot_that_was_opened_again_is_claimed_for_its_new_order_alone(memory):
    """Otherwise a worker that still looks through its old order would do a task twice, and leave the result in the
    place of another task's result."""
    memory.open([0, 1], order=0)
    assert memory.claim([0, 1], order=0, worker=5) == 0
    memory.put(0, "first", arrays(0.0))
    memory.open([0], order=1)
    assert memory.claim([0, 1], order=0, worker=5) == 1
    assert memory.claim([0, 1], order=0, worker=5) is None
    memory.withdraw([0, 1], order=0)
    assert memory.claim([0], order=1, worker=6) == 0


@pytest.mark.parametrize("what", ["put", "open", "claim", "get"])
def test_flags_are_set_and_believed_under_the_memorys_lock_alone(what, memory):
    """Releasing and acquiring the lock orders memory between processes on processors that may reorder stores."""
    memory.open([0], order=0)
    memory.put(1, "there", arrays(1.0))
    other = SharedMemory(memory.address)
    calls: dict[str, Callable[[], object]] = {
        "put": lambda: other.put(0, "reply", arrays(0.0)),
        "open": lambda: other.open([1], order=1),
        "claim": lambda: other.claim([0], order=0, worker=3),
        "get": lambda: other.get(1),
    }
    handle = os.open(memory.address.path, os.O_RDWR)
    fcntl.flock(handle, fcntl.LOCK_EX)
    before = memory.owners[:2].tolist()
    call = threading.Thread(target=calls[what])
    call.start()
    deadline = time.monotonic() + 300
    while not asleep(call) and time.monotonic() < deadline:
        assert call.is_alive(), f"{what} did not wait for the lock"
    assert call.is_alive(), f"{what} did not wait for the lock"
    assert memory.owners[:2].tolist() == before
    os.close(handle)
    call.join(300)
    assert not call.is_alive()
    if what != "get":
        assert memory.owners[:2].tolist() != before


def asleep(thread: threading.Thread) -> bool:
    """Whether a thread waits in the kernel, which it can do only for the lock."""
    try:
        with open(f"/proc/{os.getpid()}/task/{thread.native_id}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] == "S"
    except FileNotFoundError:
        return False  # it is over


WRITER = """
import hashlib, sys
import numpy as np
from fedfleet.engine.backends.ray.shared_memory import Address, SharedMemory

path, head, sums, reply, slots, worker, results = sys.argv[1], *map(int, sys.argv[2:])
memory, drawn, left = SharedMemory(Address(path, head, sums, reply, slots)), np.random.default_rng(worker), results
while left:
    slot = memory.claim(range(slots), 0, worker)
    if slot is None:
        continue
    values = [drawn.standard_normal((64, 96)), drawn.standard_normal(7)]
    told = hashlib.sha256(b"".join(value.tobytes() for value in values)).hexdigest()
    memory.put(slot, (worker, told), values)
    left -= 1
"""


def test_results_are_whole_as_soon_as_they_are_seen():
    """There are two writers, and a reader that looks all the time without waiting for a pipe."""
    specs = (Spec((64, 96), "<f8"), Spec((7,), "<f8"))
    memory, results = SharedMemory.make(64, sum(spec.bytes for spec in specs), 4096, 8), 400
    memory.open(range(8), order=0)
    given = [str(each) for each in memory.address]
    command = [sys.executable, "-c", WRITER, *given]
    writers = [subprocess.Popen([*command, str(worker), str(results)]) for worker in (1, 2)]
    seen, deadline = {1: 0, 2: 0}, time.monotonic() + 500
    try:
        while sum(seen.values()) < 2 * results and time.monotonic() < deadline:
            for slot in range(8):
                result = memory.get(slot)
                if result is None:
                    continue
                (worker, told), found = result
                assert hashlib.sha256(b"".join(value.tobytes() for value in found)).hexdigest() == told
                seen[worker] += 1
                memory.open([slot], order=0)
        assert seen == {1: results, 2: results}
        assert [writer.wait(300) for writer in writers] == [0, 0]
    finally:
        for writer in writers:
            writer.kill()
        memory.close()

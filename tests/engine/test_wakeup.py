"""A worker is woken by its bell, says that it is done, and cannot die unheard; nor can the driver."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from fedfleet.engine.backends.ray.wakeup import Bell, Ends, Heard, over

HOST = """
import sys
from fedfleet.engine.backends.ray.wakeup import Ends, Heard
bell = Heard(Ends(*sys.argv[1:]))
bell.done()
while number := bell.wait():
    if number == 13:
        sys.exit("dies")
    print(number, flush=True)
    bell.done()
print("alone", flush=True)
"""
SECONDS = 60


@contextmanager
def worker() -> Iterator[tuple[Bell, subprocess.Popen[str]]]:
    """One that has its ends."""
    bell = Bell()
    process = subprocess.Popen([sys.executable, "-c", HOST, *bell.ends], stdout=subprocess.PIPE, text=True)
    try:
        assert over([bell], SECONDS) == {bell}
        assert bell.answer()
        bell.taken()
        yield bell, process
    finally:
        process.kill()
        process.communicate()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_the_number_comes_and_the_answer():
    with worker() as (bell, process):
        for number in (1, 2**40):
            bell.ring(number)
            assert over([bell], SECONDS) == {bell}
            assert bell.answer()
            assert line(process) == str(number)
        assert over([bell], 0) == set()
        bell.close()
        assert line(process) == "alone"


@pytest.mark.parametrize("how", ["by itself", "killed"])
def test_a_death_is_heard(how):
    with worker() as (bell, process), worker() as (other, _):
        if how == "killed":
            process.kill()
        else:
            bell.ring(13)
        assert over([other, bell], SECONDS) == {bell}
        assert not bell.answer()
        bell.ring(1)  # nobody hears it, and nothing happens
        bell.close()
        other.close()


def test_a_ring_waits_for_a_worker_that_has_yet_to_come():
    bell = Bell()
    bell.ring(7)
    heard = Heard(Ends(*bell.ends))
    bell.taken()
    assert heard.wait() == 7
    heard.close()
    assert over([bell], SECONDS) == {bell}
    assert not bell.answer()
    bell.close()

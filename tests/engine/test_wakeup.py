"""A pipe wakes a worker and reports when it is done, and each side notices the death of the other."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from fedfleet.engine.backends.ray.wakeup import Ends, Listener, WakeUp, wait_for

WORKER = """
import sys
from fedfleet.engine.backends.ray.wakeup import Ends, Listener
listener = Listener(Ends(*sys.argv[1:]))
listener.done()
while number := listener.wait():
    if number == 13:
        sys.exit("dies")
    print(number, flush=True)
    listener.done()
print("alone", flush=True)
"""
SECONDS = 60


@contextmanager
def worker() -> Iterator[tuple[WakeUp, subprocess.Popen[str]]]:
    """(the pool's side, a worker process that has opened its ends of the pipes)."""
    wakeup = WakeUp()
    process = subprocess.Popen([sys.executable, "-c", WORKER, *wakeup.ends], stdout=subprocess.PIPE, text=True)
    try:
        assert wait_for([wakeup], SECONDS) == {wakeup}
        assert wakeup.answer()
        wakeup.taken()
        yield wakeup, process
    finally:
        process.kill()
        process.communicate()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_the_number_comes_and_the_answer():
    with worker() as (wakeup, process):
        for number in (1, 2**40):
            wakeup.wake(number)
            assert wait_for([wakeup], SECONDS) == {wakeup}
            assert wakeup.answer()
            assert line(process) == str(number)
        assert wait_for([wakeup], 0) is None
        wakeup.close()
        assert line(process) == "alone"


@pytest.mark.parametrize("how", ["by itself", "killed"])
def test_a_death_is_heard(how):
    with worker() as (wakeup, process), worker() as (other, _):
        if how == "killed":
            process.kill()
        else:
            wakeup.wake(13)
        assert wait_for([other, wakeup], SECONDS) == {wakeup}
        assert not wakeup.answer()
        wakeup.wake(1)  # there is no worker, and nothing happens
        wakeup.close()
        other.close()


def test_a_ring_waits_for_a_worker_that_has_yet_to_come():
    wakeup = WakeUp()
    wakeup.wake(7)
    listener = Listener(Ends(*wakeup.ends))
    wakeup.taken()
    assert listener.wait() == 7
    listener.close()
    assert wait_for([wakeup], SECONDS) == {wakeup}
    assert not wakeup.answer()
    wakeup.close()


def test_another_handle_ends_the_waiting():
    reading, writing = os.pipe()
    with worker() as (wakeup, _):
        os.write(writing, b"x")
        assert wait_for([wakeup], SECONDS, also=reading) == set()
        wakeup.wake(5)
        os.read(reading, 1)
        assert wait_for([wakeup], SECONDS, also=reading) == {wakeup}
    os.close(reading)
    os.close(writing)

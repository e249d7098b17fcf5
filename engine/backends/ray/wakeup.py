"""The pipes between a pool and a worker: one wakes the worker, and the other reports that the worker is done or dead.

With one Ray call for each round and worker, workers waited 16 to 18 of 150 ms of w1 (benchmarks/RESULTS.md); with pipes
they wait 11 to 12. Only the worker writes to its pipe, so the end of the pipe tells of the worker's death.
"""

from __future__ import annotations

import os
import select
from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple

NUMBER = 8  # bytes


class Ends(NamedTuple):
    """The paths by which the worker's process opens its ends of the pipes."""

    orders: str
    news: str


class WakeUp:
    """The pool's side."""

    def __init__(self) -> None:
        theirs, self.orders = os.pipe()
        self.news, done = os.pipe()
        self.lent = [theirs, done]  # kept open until the worker has opened them
        self.ends = Ends(*(f"/proc/{os.getpid()}/fd/{end}" for end in self.lent))

    def taken(self) -> None:
        """The worker has opened its ends: from now on they close with the worker."""
        for end in self.lent:
            os.close(end)
        self.lent = []

    def wake(self, number: int) -> None:
        """Send the worker a number other than 0. A dead worker gets nothing: `wait_for` finds it."""
        with suppress(BrokenPipeError):
            os.write(self.orders, number.to_bytes(NUMBER, "little"))

    def answer(self) -> bool:
        """True if the worker is done, False if it is dead. It is called for the objects that `wait_for` returned."""
        return bool(os.read(self.news, 1))

    def close(self) -> None:
        self.taken()
        os.close(self.orders)
        os.close(self.news)


def wait_for(wakeups: Iterable[WakeUp], seconds: float, also: int | None = None) -> set[WakeUp] | None:
    """The objects whose worker is done or dead, as soon as there is one; None after so many seconds.

    also: a further file handle; something to be read from it ends the waiting.
    """
    waiting, poll = {wakeup.news: wakeup for wakeup in wakeups}, select.poll()
    for handle in [*waiting, *([] if also is None else [also])]:
        poll.register(handle, select.POLLIN)
    ready = poll.poll(1e3 * seconds)
    return {waiting[handle] for handle, _ in ready if handle in waiting} if ready else None


class Listener:
    """The worker's side."""

    def __init__(self, ends: Ends) -> None:
        self.orders, self.news = os.open(ends.orders, os.O_RDONLY), os.open(ends.news, os.O_WRONLY)

    def wait(self) -> int:
        """The next number that the pool sends; 0 if the pool is gone."""
        return int.from_bytes(os.read(self.orders, NUMBER), "little")

    def done(self) -> None:
        with suppress(BrokenPipeError):  # the pool is gone, as `wait` will say
            os.write(self.news, b"\n")

    def close(self) -> None:
        os.close(self.orders)
        os.close(self.news)

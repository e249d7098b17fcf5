"""How the driver wakes a worker of its node and hears that it is done: a pipe each way.

A call of Ray's a round and worker had workers wait 16 to 18 of 150 ms of w1 (benchmarks/RESULTS.md), a pipe 11 to 12. A
worker alone writes to its pipe, so that its end tells of its death.
"""

from __future__ import annotations

import os
import select
from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple

NUMBER = 8  # bytes


class Ends(NamedTuple):
    """How the worker's process opens its ends."""

    orders: str
    news: str


class Bell:
    """The driver's side."""

    def __init__(self) -> None:
        theirs, self.orders = os.pipe()
        self.news, done = os.pipe()
        self.lent = [theirs, done]  # kept open until the worker has opened them
        self.ends = Ends(*(f"/proc/{os.getpid()}/fd/{end}" for end in self.lent))

    def taken(self) -> None:
        """The worker has its ends: from now on they go with it."""
        for end in self.lent:
            os.close(end)
        self.lent = []

    def ring(self, number: int) -> None:
        """Tell the worker a number, not 0. One that is dead is told nothing: `over` finds it."""
        with suppress(BrokenPipeError):
            os.write(self.orders, number.to_bytes(NUMBER, "little"))

    def answer(self) -> bool:
        """Of a bell that `over` gave: whether the worker is done; else it is dead."""
        return bool(os.read(self.news, 1))

    def close(self) -> None:
        self.taken()
        os.close(self.orders)
        os.close(self.news)


def over(bells: Iterable[Bell], seconds: float) -> set[Bell]:
    """Those whose worker is done or dead, as soon as there is one, else none after `seconds`."""
    waiting, asked = {bell.news: bell for bell in bells}, select.poll()
    for handle in waiting:
        asked.register(handle, select.POLLIN)
    return {waiting[handle] for handle, _ in asked.poll(1e3 * seconds)}


class Heard:
    """The worker's side."""

    def __init__(self, ends: Ends) -> None:
        self.orders, self.news = os.open(ends.orders, os.O_RDONLY), os.open(ends.news, os.O_WRONLY)

    def wait(self) -> int:
        """The number that the driver tells next; 0 once it is gone."""
        return int.from_bytes(os.read(self.orders, NUMBER), "little")

    def done(self) -> None:
        with suppress(BrokenPipeError):  # the driver is gone, as `wait` will say
            os.write(self.news, b"\n")

    def close(self) -> None:
        os.close(self.orders)
        os.close(self.news)

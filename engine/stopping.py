"""Ending a run by SIGINT (Ctrl-C) or SIGTERM.

A signal sets a flag that the engine reads between local steps, so that the last round can be checkpointed. An exception
raised by the handler would interrupt whatever line is running, possibly in a destructor, where it is lost. Only where
nothing can be lost yet and another library is waiting, as while Ray starts, an exception is used because it is quick:
see `Stop.at_once`.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from .errors import Interrupted

REPEAT_SECONDS = 1.0
"""The time after which a signal that should interrupt at once is sent again."""


class Stop:
    """A callable that returns the number of the signal that has arrived, or 0."""

    def __init__(self) -> None:
        self.number = 0
        self.interrupts = False  # whether the handler raises KeyboardInterrupt

    def __call__(self) -> int:
        return self.number

    def handle(self, number: int, frame: Any) -> None:
        """The signal handler. A second signal raises KeyboardInterrupt."""
        is_second, self.number = self.number != 0, self.number or number
        if self.interrupts:
            self._repeat()
        if is_second or self.interrupts:
            raise KeyboardInterrupt

    def _repeat(self) -> None:
        """Send the signal again after a while, since the exception may be lost in a destructor or a callback."""

        def again() -> None:
            if self.interrupts:
                os.kill(os.getpid(), self.number)

        timer = threading.Timer(REPEAT_SECONDS, again)
        timer.daemon = True
        timer.start()

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """While it lasts, a signal raises Interrupted immediately."""
        self.interrupts = True
        try:
            if self.number:
                raise KeyboardInterrupt
            yield
        except KeyboardInterrupt:
            self.interrupts = False
            raise Interrupted(self.number or signal.SIGINT) from None
        finally:
            self.interrupts = False
        if self.number:
            raise Interrupted(self.number)


@contextmanager
def stopping(stop: Stop | None = None) -> Iterator[Stop]:
    """While it lasts, SIGINT and SIGTERM set a flag. Yields the function that returns the flag, see `Stop`.

    stop: the flag to set, a new one by default. Python delivers signals to the main thread only. In any other thread
    the flag stays as it is.
    """
    stop = stop or Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.signal(number, stop.handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def at_once(stop: Callable[[], int]) -> Any:
    """`Stop.at_once` if the function belongs to this process's own signals, else a context that does nothing."""
    return stop.at_once() if isinstance(stop, Stop) else nullcontext()

"""Ending a run by SIGINT (Ctrl-C) or SIGTERM.

A signal sets a flag that is looked at between local steps, so that the last round can be checkpointed. An exception out
of the handler would hit whatever line is under way, in a destructor too, where it is lost. Where nothing is at stake
yet and another library waits, as while Ray starts, that is the only way to be quick: see `Stop.at_once`.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from .errors import Interrupted

AGAIN_SECONDS = 1.0


class Stop:
    """Called, it says the number of the signal that has come, or 0."""

    def __init__(self) -> None:
        self.number = 0
        self.eager = False

    def __call__(self) -> int:
        return self.number

    def heard(self, number: int, frame: Any) -> None:
        """The signals' handler. A second signal insists: it raises KeyboardInterrupt."""
        insists, self.number = self.number != 0, self.number or number
        if self.eager:
            self._come_back()
        if insists or self.eager:
            raise KeyboardInterrupt

    def _come_back(self) -> None:
        """The exception may be lost in a destructor or a callback, so it is raised again after a while."""

        def again() -> None:
            if self.eager:
                os.kill(os.getpid(), self.number)

        timer = threading.Timer(AGAIN_SECONDS, again)
        timer.daemon = True
        timer.start()

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """A signal ends what is done here at once, by Interrupted."""
        self.eager = True
        try:
            if self.number:
                raise KeyboardInterrupt
            yield
        except KeyboardInterrupt:
            self.eager = False
            raise Interrupted(self.number or signal.SIGINT) from None
        finally:
            self.eager = False
        if self.number:
            raise Interrupted(self.number)


@contextmanager
def stopping() -> Iterator[Callable[[], int]]:
    """While it lasts, SIGINT and SIGTERM of this process set a flag, which what is yielded returns."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda: 0
        return
    stop = Stop()
    before = {number: signal.signal(number, stop.heard) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def at_once(stop: Callable[[], int]) -> Any:
    """`Stop.at_once`, where the signals are this process's own."""
    return stop.at_once() if isinstance(stop, Stop) else nullcontext()

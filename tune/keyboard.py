"""Ctrl-C while a command starts and ends. Nothing heavy is imported here, so that it is heard from the first moment."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

INTERRUPTED = 128


def leave(number: int, frame: Any) -> None:
    """End at once, while packages are imported and nothing is at stake: an exception in the middle of an import of C++
    code may abort the process, and one in a destructor is lost."""
    os.write(2, b"interrupted\n")
    os._exit(INTERRUPTED + number)


def arm() -> None:
    """Until a run takes the signal for itself, Ctrl-C ends the process at once."""
    signal.signal(signal.SIGINT, leave)


@contextmanager
def keyboard() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt meanwhile, for commands that have something to say or to end."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def finish(commands: Callable[[], Any]) -> None:
    """Carry out the command. One that was interrupted ends without the interpreter's own end: threads may be in the
    middle of an import, and would abort it."""
    try:
        commands()
    except SystemExit as end:
        if isinstance(end.code, int) and end.code > INTERRUPTED:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(end.code)
        raise

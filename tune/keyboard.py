"""Handling of Ctrl-C while a command starts and ends. It imports nothing large, so that Ctrl-C works at once."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from .streams import open_missing

INTERRUPTED = 128
"""Exit status of a command that a signal ended, less the signal's number."""


def exit_now(number: int, frame: Any) -> None:
    """Signal handler that ends the process at once. It is for the time in which packages are imported, when there is
    nothing to lose: an exception in the middle of an import of C++ code may abort the process, and an exception in a
    destructor is lost."""
    os.write(2, b"interrupted\n")
    os._exit(INTERRUPTED + number)


def arm() -> None:
    """Make Ctrl-C end the process at once, until a run installs its own handler."""
    signal.signal(signal.SIGINT, exit_now)


@contextmanager
def keyboard() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt in this context, for commands that print a message or clean up when they end."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def finish(commands: Callable[[], Any]) -> None:
    """Run the command. If it was interrupted, the process exits without the interpreter's shutdown, which would abort
    if a thread is in the middle of an import. Otherwise the shutdown does not look for garbage among the objects that
    are there now, which would take most of a second once torch is imported."""
    open_missing()
    try:
        commands()
    except SystemExit as end:
        if isinstance(end.code, int) and end.code > INTERRUPTED:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(end.code)
        gc.freeze()
        raise

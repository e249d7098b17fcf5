"""Handling of signals while a command starts and ends. It imports nothing large, so that Ctrl-C works at once."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ..engine.stopping import SIGNALS, exit_now
from .streams import open_missing, replace_unknown

INTERRUPTED = 128
"""Exit status of a command that a signal ended, less the signal's number."""


def arm() -> None:
    """Make Ctrl-C, and what else ends a run, end the process at once, until a run installs its own handler. `nohup`
    has the process ignore SIGHUP, and so it does."""
    for number in SIGNALS:
        if number == signal.SIGINT or signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, exit_now)


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
    replace_unknown()
    try:
        commands()
    except SystemExit as end:
        if isinstance(end.code, int) and end.code > INTERRUPTED:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(end.code)
        gc.freeze()
        raise

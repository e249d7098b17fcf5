"""What commands print. A stream that cannot be written to costs lines, never a run."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from ..engine.errors import FedFleetError

NO_READER = 141
"""Exit status of a command whose reader has ended, as in `fedfleet list methods | head -1`: 128 + SIGPIPE."""


def open_missing() -> None:
    """Open the standard streams that the caller has closed, on /dev/null.

    Otherwise the next files that are opened would get their numbers, and messages would be written into these files.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # it gets the lowest number that is free
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


def replace_unknown() -> None:
    """Have standard output show "?" for characters that its encoding lacks, as ± in ASCII. Otherwise a command would
    end with an exception when it prints them, after all its work."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")


def tell(line: str) -> None:
    """Print a line to standard error: progress, or a message. What cannot be written is lost."""
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:
        _give_up(2)


@contextmanager
def passing(text: str, quiet: bool = False) -> Iterator[None]:
    """Show a text on a terminal until the context ends, so that a command has said something before its first line."""
    shows = not quiet and sys.stderr.isatty()
    if shows:
        print(text, end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        if shows:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def say(text: str) -> None:
    """Print the outcome of a command to standard output.

    Raises FedFleetError if that is impossible, and SystemExit, without a message, if nobody reads it any more.
    """
    try:
        print(text, flush=True)
    except BrokenPipeError:
        _give_up(1)
        sys.exit(NO_READER)
    except OSError as error:
        _give_up(1)
        raise FedFleetError(
            f"standard output cannot be written to ({error.strerror}); what the command has done is kept, only its "
            "last lines are lost"
        ) from None


def _give_up(number: int) -> None:
    """Write to /dev/null from now on. Otherwise Python tries again when it ends, and changes the exit status."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, number)
    os.close(nothing)

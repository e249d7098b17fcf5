"""Which lines of an exception's traceback are the user's own, and how a message names them.

A plug-in's mistake is raised many calls below the engine, often inside torch. What helps its author are the lines of
the author's own files; the whole traceback goes to the run's log.
"""

from __future__ import annotations

import functools
import linecache
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from .errors import ConfigError, FedFleetError

LIBRARIES = ("torch", "torchvision", "numpy", "scipy", "ray", "pandas", "pyarrow", "sklearn", "pydantic", "click")
"""Installed packages whose lines are never the user's. Other installed packages may be plug-ins."""
SHOWN = 4
"""The user's lines that a message names at most, the innermost first; the log has all."""


class Line(NamedTuple):
    """A line of the user's code. `code`: the source text, "" where it cannot be found."""

    file: str
    number: int
    function: str
    code: str

    @staticmethod
    def of(file: str, number: int, function: str) -> Line:
        return Line(file, number, function, linecache.getline(file, number).strip())

    def __str__(self) -> str:
        text = f"{self.file}, line {self.number} in {self.function}"
        return f"{text}: {self.code}" if self.code else text


@functools.cache
def _ours() -> tuple[str, ...]:
    """The folders of this package's four parts."""
    root = Path(__file__).resolve().parent.parent
    return tuple(f"{root / part}/" for part in ("algorithms", "engine", "tune", "workloads"))


@functools.cache
def is_users(file: str) -> bool:
    """Whether a file is neither of this package, nor of Python's library, nor of a package in LIBRARIES."""
    if file.startswith("<frozen ") or file.startswith("<string>") or file.startswith("<__array_function__"):
        return False
    path = str(Path(file).resolve()) if not file.startswith("<") else file
    if path.startswith(_ours()):
        return False
    parts = Path(path).parts
    for folder in ("site-packages", "dist-packages"):
        if folder in parts:
            return parts[parts.index(folder) + 1].removesuffix(".py") not in LIBRARIES
    places = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    return not any(path.startswith(f"{Path(place).resolve()}/") for place in places)


def lines_of(error: BaseException) -> list[Line]:
    """The user's lines of an exception's traceback, the innermost first."""
    frames = traceback.extract_tb(error.__traceback__)
    found = [Line.of(f.filename, f.lineno or 0, f.name) for f in frames if is_users(f.filename)]
    return found[::-1]


def placed(error: BaseException) -> str:
    """ " (file, line 12 in step: code; called by …)", or "" where no line of the user's is in the traceback."""
    lines = lines_of(error)[:SHOWN]
    return f" ({'; called from '.join(map(str, lines))})" if lines else ""


TOO_LARGE = (
    "Storage size calculation overflowed",
    "can't allocate memory",
    "Unable to allocate",
    "without overflow",
    "Overflow when unpacking",
    "too large to convert",
    "too big to convert",
    "array is too big",
    "Maximum allowed dimension",
)
"""What torch, numpy and Python say of numbers that no tensor can be of, or have."""


def said(error: BaseException) -> str:
    """The exception's type, the first line of its message, and the user's lines."""
    if isinstance(error, FedFleetError):
        return str(error)
    if any(words in str(error) for words in TOO_LARGE):
        text = str(error).splitlines()[0]
        return f"a setting is too large for a tensor or for this machine ({text}); lower it{placed(error)}"
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}{': ' if lines else ''}{lines[0] if lines else ''}{placed(error)}"


def largest(settings: Any, path: str = "") -> tuple[float, str]:
    """(its size, "method.tau=1e+30") of the number among settings, however deep, that is furthest from 0."""
    if isinstance(settings, dict):
        inner = [largest(value, f"{path}.{key}") for key, value in settings.items()]
    elif isinstance(settings, list | tuple):
        inner = [largest(value, path) for value in settings]
    elif isinstance(settings, int | float) and not isinstance(settings, bool):
        return abs(settings), f"{path}={settings}"
    else:
        inner = []
    return max(inner, default=(0.0, ""))


@contextmanager
def blamed(what: str, kind: type[FedFleetError] = ConfigError, settings: Any = None) -> Iterator[None]:
    """Turn what a plug-in raises into one sentence that begins with `what` and names the user's lines.

    A ValueError is how a part refuses its arguments: as a ConfigError it keeps its message alone. Errors of this
    package pass unchanged, and so do those of the operating system that no line of the user's had part in. settings: by
    key, for the message on a number that is too large.
    """
    try:
        yield
    except FedFleetError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and not lines_of(error):
            raise
        large = any(words in str(error) for words in TOO_LARGE)
        if large and (named := largest(settings, what)[1]):
            text = str(error).splitlines()[0]
            raise kind(f"{what}: a setting is too large ({text}), got {named}; lower it{placed(error)}") from error
        if isinstance(error, ValueError) and kind is ConfigError and not large:
            text = " ".join(str(error).split())
            raise kind(f"{what}: {text or type(error).__name__}{placed(error)}") from error
        raise kind(f"{what}: {said(error)}") from error


# --- finding a line that does something -------------------------------------------------------------------------------
class Finder:
    """Runs a function and finds the first of the user's lines after which `happened()` is true.

    `found`: that line, or None. `returned`: the lines on which the user's outermost functions returned.
    """

    def __init__(self, happened: Callable[[], bool] = lambda: False) -> None:
        self.happened = happened
        self.found: Line | None = None
        self.in_losses = False  # whether `found` lies below the workload's losses
        self.returned: list[Line] = []
        self.depth = 0

    def run(self, function: Callable[[], Any]) -> None:
        """Exceptions of the function are of no interest here."""
        before = sys.gettrace()
        sys.settrace(self._called)
        try:
            function()
        except Exception:
            pass
        finally:
            sys.settrace(before)

    def _called(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not is_users(frame.f_code.co_filename):
            return None
        self.depth += 1
        last = frame.f_lineno

        def inside(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal last
            if event in ("line", "return"):
                if self.found is None and self.happened():
                    self.found = Line.of(frame.f_code.co_filename, last, frame.f_code.co_name)
                    self.in_losses = below_losses(frame)
                last = frame.f_lineno
            if event == "return":
                self.depth -= 1
                if not self.depth:
                    self.returned.append(Line.of(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
            return inside

        return inside


def below_losses(frame: FrameType | None) -> bool:
    """Whether a frame was called, however indirectly, by what asks a workload for its losses (`LocalTrainer.loss`)."""
    while frame is not None:
        if frame.f_code.co_name == "loss" and frame.f_code.co_filename.endswith("/clients/local_training.py"):
            return True
        frame = frame.f_back
    return False

"""Finds the user's own lines in the traceback of an exception, for messages.

A mistake in a plug-in is raised many calls below the engine, often inside torch. The author of the plug-in needs the
lines of the plug-in's own files. The full traceback goes to the log of the run.
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
from types import CodeType, FrameType
from typing import Any, NamedTuple

from .errors import RAISED_BY_USERS, ConfigError, FedFleetError

LIBRARIES = ("torch", "torchvision", "numpy", "scipy", "ray", "pandas", "pyarrow", "sklearn", "pydantic", "click")
"""Installed packages whose lines never count as the user's. Other installed packages may be plug-ins."""
SHOWN_LINES = 4
"""The largest number of the user's lines that a message names, the innermost first. The log has all of them."""
TOO_LARGE_MESSAGES = (
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
"""Parts of the messages of torch, numpy and Python about numbers that are too large for a tensor or for its shape."""


class Line(NamedTuple):
    """A line of the user's code. `code` is the source text, "" if it cannot be found."""

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
def _own_folders() -> tuple[str, ...]:
    """The folders of the four parts of this package."""
    root = Path(__file__).resolve().parent.parent
    return tuple(f"{root / part}/" for part in ("algorithms", "engine", "tune", "workloads"))


@functools.cache
def is_user_file(file: str) -> bool:
    """Whether a file belongs neither to this package, nor to Python's library, nor to a package in LIBRARIES."""
    if file.startswith("<frozen ") or file.startswith("<string>") or file.startswith("<__array_function__"):
        return False
    path = str(Path(file).resolve()) if not file.startswith("<") else file
    if path.startswith(_own_folders()):
        return False
    parts = Path(path).parts
    for folder in ("site-packages", "dist-packages"):
        if folder in parts:
            return parts[parts.index(folder) + 1].removesuffix(".py") not in LIBRARIES
    libraries = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    return not any(path.startswith(f"{Path(library).resolve()}/") for library in libraries)


def user_lines(error: BaseException) -> list[Line]:
    """The user's lines in an exception's traceback, the innermost first."""
    frames = traceback.extract_tb(error.__traceback__)
    found = [Line.of(f.filename, f.lineno or 0, f.name) for f in frames if is_user_file(f.filename)]
    return found[::-1]


def current_line(thread: int) -> Line | None:
    """The innermost of the user's lines that a thread executes now; without one, the innermost of all. None if the
    thread has ended."""
    if (frame := sys._current_frames().get(thread)) is None:
        return None
    stack = traceback.extract_stack(frame)
    found = next((each for each in reversed(stack) if is_user_file(each.filename)), stack[-1])
    return Line.of(found.filename, found.lineno or 0, found.name)


def location_clause(error: BaseException) -> str:
    """ " (file, line 12 in step: code; called from …)", or "" if no line in the traceback is the user's."""
    lines = user_lines(error)[:SHOWN_LINES]
    return f" ({'; called from '.join(map(str, lines))})" if lines else ""


def error_summary(error: BaseException) -> str:
    """The type of an exception, the first line of its message, and the user's lines."""
    if isinstance(error, FedFleetError):
        return str(error)
    if is_too_large(error):
        text = str(error).splitlines()[0]
        return f"a setting is too large for a tensor or for this machine ({text}); lower it{location_clause(error)}"
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}{': ' if lines else ''}{lines[0] if lines else ''}{location_clause(error)}"


def is_too_large(error: BaseException) -> bool:
    """Whether an exception says that a number is too large for a tensor or for its shape."""
    return any(words in str(error) for words in TOO_LARGE_MESSAGES)


def largest_number(settings: Any, key: str = "") -> tuple[float, str]:
    """The number in nested settings that is furthest from 0, as (its size, "method.tau=1e+30")."""
    if isinstance(settings, dict):
        inner = [largest_number(value, f"{key}.{name}") for name, value in settings.items()]
    elif isinstance(settings, list | tuple):
        inner = [largest_number(value, key) for value in settings]
    elif isinstance(settings, int | float) and not isinstance(settings, bool):
        return abs(settings), f"{key}={settings}"
    else:
        inner = []
    return max(inner, default=(0.0, ""))


@contextmanager
def plugin_errors(what: str, kind: type[FedFleetError] = ConfigError, settings: Any = None) -> Iterator[None]:
    """Turns an exception of a plug-in into one sentence that begins with `what` and names the user's lines.

    Parts refuse their arguments by a ValueError: as a ConfigError it keeps only its message. Errors of this package
    pass unchanged, and so do errors of the operating system if no line in their traceback is the user's.

    `kind`: the type of the error that is raised instead. `settings`: the settings by key, from which a message about
    a number that is too large names the largest one.
    """
    try:
        yield
    except FedFleetError:
        raise
    except RAISED_BY_USERS as error:
        if isinstance(error, OSError) and not user_lines(error):
            raise
        too_large, location = is_too_large(error), location_clause(error)
        if too_large and (largest := largest_number(settings, what)[1]):
            text = str(error).splitlines()[0]
            raise kind(f"{what}: a setting is too large ({text}), got {largest}; lower it{location}") from error
        if isinstance(error, ValueError) and kind is ConfigError and not too_large:
            text = " ".join(str(error).split())
            raise kind(f"{what}: {text or type(error).__name__}{location}") from error
        raise kind(f"{what}: {error_summary(error)}") from error


# --- finding the line that has an effect ------------------------------------------------------------------------------
class LineFinder:
    """Runs a function and finds the first of the user's lines after which `happened()` is true.

    `found` is that line, or None. `below` says whether `caller` is among its callers. `returned` holds the lines on
    which the outermost of the user's functions returned.
    """

    def __init__(self, happened: Callable[[], bool], caller: CodeType) -> None:
        self.happened, self.caller = happened, caller
        self.found: Line | None = None
        self.below = False
        self.returned: list[Line] = []
        self.depth = 0

    def run(self, function: Callable[[], Any]) -> None:
        """Call the function and watch it. Exceptions that it raises are ignored."""
        before = sys.gettrace()
        sys.settrace(self._called)
        try:
            function()
        except Exception:
            pass
        finally:
            sys.settrace(before)

    def _called(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not is_user_file(frame.f_code.co_filename):
            return None
        self.depth += 1
        last = frame.f_lineno

        def inside(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal last
            if event in ("line", "return"):
                if self.found is None and self.happened():
                    self.found = Line.of(frame.f_code.co_filename, last, frame.f_code.co_name)
                    self.below = is_called_by(frame, self.caller)
                last = frame.f_lineno
            if event == "return":
                self.depth -= 1
                if not self.depth:
                    self.returned.append(Line.of(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
            return inside

        return inside


def is_called_by(frame: FrameType | None, caller: CodeType) -> bool:
    """Whether a function is among the callers of a frame."""
    while frame is not None:
        if frame.f_code is caller:
            return True
        frame = frame.f_back
    return False

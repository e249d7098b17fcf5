"""The thread that writes to a tracker: a single run, or the run of a search or study with one nested run for each trial
or cell.

Importing a tracker's package and opening its store take seconds that a run should not wait for, and a store may allow
one writer only. So the callers put messages into a queue, and one thread writes them in batches. Nothing is written
before the first round of a run is over or a run has ended, so an experiment that cannot start leaves nothing behind. If
the store fails, a warning with the reason is printed and the run itself continues. A store that fails only for a while,
such as a server that restarts, receives the missing values with the next batch. What a store refuses for good is left
out, with one warning, and what follows is written.
"""

from __future__ import annotations

import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from ...engine.errors import ConfigError
from ...engine.records.client_models import FILE as CLIENT_MODELS
from ...engine.records.history import Record
from ...engine.runs.saved_files import read_rows
from ...engine.storage.secrets import redacted
from ..streams import tell
from .stores import SECONDS

REPORT = "report.html"
"""Name of the report among the artifacts."""

LOOK_SECONDS = 0.2
"""Time between checks whether the store has been opened, when everything else is over."""

FLUSH_SECONDS = 1.0
"""How long rounds are gathered before they are written."""

TOP = ""
"""Key of the single run, or of the search's or study's own run, which is the parent of all other runs."""

FILES = (
    "config.yaml",
    "rounds.parquet",
    CLIENT_MODELS,
    "result.json",
    "failure.json",
    "environment.json",
    "plan.json",
    "partition.json",
    "run.log",
)
"""Files of a run's folder that become artifacts."""


@dataclass(frozen=True)
class RunHeader:
    """What is written of a run when it begins. parameters: a nested mapping of settings, which the writer flattens.
    data_set: the arguments of MLflow's Dataset, {} for none."""

    name: str
    tags: dict[str, str]
    parameters: dict[str, Any] = field(default_factory=dict)
    data_set: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class End:
    """Message: a run has ended.

    key: of the run. status: value of the tag `status`. reason: a sentence on a failure, else "". folder: the run's
    folder, whose FILES become artifacts. whole: whether to read the records from the folder too. once: whether to write
    nothing if an earlier process has already written this run with this status, except its name and the tags in
    `labels` where these tags have changed. records: further metrics as (key of the run, record), with the step under
    `round`. files: further artifacts, files or folders. texts: returns further artifacts, file name -> text. model:
    exports the final model into a new folder and returns its mlflow.models.Model; None for a run whose model is not
    logged. name, labels: of the run as it is called now.
    """

    key: str
    status: str
    reason: str = ""
    folder: Path | None = None
    whole: bool = False
    once: bool = False
    records: tuple[tuple[str, Record], ...] = ()
    files: tuple[Path, ...] = ()
    texts: Callable[[], dict[str, str]] = dict
    model: Callable[[Path], Any] | None = None
    name: str = ""
    labels: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Batch:
    """Message: rounds of a run are over. key: of the run; records: (time in milliseconds, record) of each round."""

    key: str
    records: list[tuple[int, Record]]


Message = Batch | End | None
"""None: no further message follows."""


class Inbox(ABC):
    """What runs, searches and studies see of a writer: where they put messages."""

    def __init__(self) -> None:
        self.headers: dict[str, tuple[int, Callable[[], RunHeader]]] = {}  # key -> (time in milliseconds, header)

    def begin(self, key: str, header: Callable[[], RunHeader]) -> None:
        """A run begins. header: called when something of the run is written for the first time."""
        self.headers[key] = (now(), header)

    def open_early(self) -> None:
        """Open the store and begin the top run now, although there is nothing to be written yet. It takes seconds."""
        self.put(Batch(TOP, []))

    def rounds(self, key: str, records: Iterable[Record]) -> None:
        """Rounds of a run are over."""
        stamp = now()
        if batch := [(stamp, record) for record in records]:
            self.put(Batch(key, batch))

    def end(self, end: End) -> None:
        """A run has ended."""
        self.put(end)

    @abstractmethod
    def put(self, message: Batch | End) -> None:
        """Have a message dealt with."""

    @abstractmethod
    def close(self) -> None:
        """Wait until everything is written."""

    @abstractmethod
    def abandon(self) -> None:
        """End without a message; does not wait, not even for the import of the tracker's package."""


class Writer(Inbox):
    """Writes a run, or a search's or study's run and the nested ones, in a thread of its own. A subclass writes to one
    kind of store; its methods are called in the thread."""

    tracker: ClassVar[str]
    """Name of the kind of store, for messages."""
    is_local: bool = False
    """Whether the store is on this machine. `close` then waits for it however long it takes to open."""

    def __init__(self, what: str) -> None:
        """Starts the thread. what: run, search or study, for the warning."""
        super().__init__()
        self.what = what
        self.made: dict[str, RunHeader] = {}  # key -> the header, once it has been needed
        self.messages: queue.Queue[Message] = queue.Queue()
        self.opening = 0.0  # time.monotonic() when opening the store began
        self.is_open = False
        self.told = False  # whether a warning has told of something refused
        self.thread = threading.Thread(target=self._work, name=self.tracker.lower(), daemon=True)
        self.thread.start()

    # --- the callers' side --------------------------------------------------------------------------------------------
    def put(self, message: Batch | End) -> None:
        self.messages.put(message)

    def close(self) -> None:
        """Wait until everything is written, but not for a server that does not answer within SECONDS."""
        self.messages.put(None)
        closing = time.monotonic()
        while self.thread.is_alive():
            self.thread.join(LOOK_SECONDS)
            waited = time.monotonic() - max(closing, self.opening)
            if self.opening and not self.is_open and not self.is_local and waited > SECONDS:
                self.warn(TimeoutError(f"tracking.uri: the store has not answered within {SECONDS:g} s"))
                return

    def abandon(self) -> None:
        self.messages.put(None)

    # --- what a subclass uses -----------------------------------------------------------------------------------------
    def header(self, key: str) -> RunHeader:
        """The header of a run that has begun."""
        if key not in self.made:
            self.made[key] = self.headers[key][1]()
        return self.made[key]

    # --- what a subclass does -----------------------------------------------------------------------------------------
    @abstractmethod
    def load(self) -> None:
        """Import the tracker's package."""

    @abstractmethod
    def open(self) -> None:
        """Open the store."""

    @abstractmethod
    def begin_top(self) -> None:
        """Begin the top run, or continue the one of an earlier process, with its nested runs."""

    @abstractmethod
    def write_records(self, batch: Batch) -> None:
        """Write the metrics of rounds, in a run that is begun with its header unless it has been."""

    @abstractmethod
    def write_end(self, end: End) -> None:
        """Write what comes with the end of a run, whose records have been written."""

    @abstractmethod
    def is_written(self, end: End) -> bool:
        """Whether nothing is to be written, since `end.once` asks for that and an earlier process has written it."""

    @abstractmethod
    def is_refusal(self, error: Exception) -> bool:
        """Whether the store has refused something that it would refuse again."""

    @abstractmethod
    def stop(self) -> None:
        """End what runs beside the thread, whatever has happened before."""

    # --- the thread ---------------------------------------------------------------------------------------------------
    def _work(self) -> None:
        try:
            self.load()
            first = self.messages.get()
            if first is not None:
                self.opening = time.monotonic()
                self.open()
                self.is_open = True
                self.begin_top()
                self._follow(first)
        except Exception as error:  # a store may raise anything
            self.warn(error)
        finally:
            self.stop()

    def _follow(self, first: Message) -> None:
        """Write all messages until None."""
        todo: list[Message] = [first]
        while True:
            self._gather(todo)
            closed = todo[-1] is None
            todo = merged(todo)
            try:
                while todo:
                    self._deal_with(todo[0])
                    todo.pop(0)
            except Exception:
                if closed:
                    raise
            if closed:
                return
            todo.append(self.messages.get())

    def _gather(self, todo: list[Message]) -> None:
        """Append the messages that arrive within FLUSH_SECONDS."""
        deadline = time.monotonic() + FLUSH_SECONDS
        while todo[-1] is not None and (left := deadline - time.monotonic()) > 0:
            try:
                todo.append(self.messages.get(timeout=left))
            except queue.Empty:
                return

    def _deal_with(self, message: Message) -> None:
        """Write a message, or leave it out if the store refuses it for good: it must not stop those behind it."""
        try:
            if isinstance(message, Batch):
                self.write_records(message)
            elif isinstance(message, End) and not self.is_written(message):
                for batch in batches_of(message):
                    self.write_records(batch)
                self.write_end(message)
        except Exception as error:
            self.tell_refused(error)

    def tell_refused(self, error: Exception) -> None:
        """Warn, the first time, of what the store refuses for good. Raises any other error again."""
        if not self.is_refusal(error):
            raise error
        if not self.told:
            self.warn(error, f"the store refuses some values, which are not tracked in {self.tracker}")
        self.told = True

    def warn(self, error: Exception, what: str = "") -> None:
        """Print a warning. what: the beginning of the sentence, unless nothing is tracked."""
        reason = redacted(str(error) or type(error).__name__)
        tell(warning(what or f"not tracked in {self.tracker}", reason, self.what))


def warning(problem: str, reason: str, what: str) -> str:
    """The line on a problem of a tracker. what: run, search or study."""
    return f"warning: {problem}: {' '.join(reason.split())}; the {what} itself continues"


def merged(messages: list[Message]) -> list[Message]:
    """The same messages, with the rounds of a run joined into one message."""
    made: list[Message] = []
    batches: dict[str, list[tuple[int, Record]]] = {}
    for message in messages:
        if message is None:
            continue
        if isinstance(message, End):
            made.append(message)
            batches.pop(message.key, None)
        elif message.key in batches:
            batches[message.key] += message.records
        else:
            batches[message.key] = list(message.records)
            made.append(Batch(message.key, batches[message.key]))
    return made


def batches_of(end: End) -> Iterator[Batch]:
    """The records that come with the end of a run."""
    file = end.folder / "rounds.parquet" if end.whole and end.folder is not None else None
    if file is not None and file.is_file():
        stamp = now()
        yield Batch(end.key, [(stamp, row) for row in read_rows(file)])
    for key, record in end.records:
        yield Batch(key, [(now(), record)])


def package_is_there(package: str, extra: str) -> None:
    """Raise ConfigError if the package that a tracker needs is not installed. extra: that installs it, which is also
    the name of the tracker."""
    if find_spec(package) is None:
        raise ConfigError(f'tracking: {extra} needs the package {package}, got none; pip install "fedfleet[{extra}]"')


def now() -> int:
    """The time in milliseconds."""
    return int(time.time() * 1000)

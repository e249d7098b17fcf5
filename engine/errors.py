"""Errors that a user can act on: one sentence with the key, the value and the remedy."""

from __future__ import annotations

import traceback
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

LONGEST_TRACEBACK = 16_000
"""The number of characters of a traceback that travel from one process to another."""


RAISED_BY_USERS = (Exception, SystemExit)
"""What the code of a user may raise. `sys.exit` raises SystemExit, which is no Exception: a plug-in that calls it must
not end the process as if nothing had happened."""


def full_traceback(error: BaseException) -> str:
    """The traceback as Python prints it, with its causes. A very long one is cut in the middle."""
    if isinstance(error, RemoteCause):
        return str(error).strip()
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__)).rstrip()
    if len(text) <= LONGEST_TRACEBACK:
        return text
    half = LONGEST_TRACEBACK // 2
    return f"{text[:half]}\n…\n{text[-half:]}"


def first_line(error: BaseException) -> str:
    """The first line of the error's message, or the name of the error's type if the message is empty."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def type_and_first_line(error: BaseException) -> str:
    """The type and the first line of the message, as in "ValueError: the line", at most 300 characters."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}"[:300] if lines else type(error).__name__


class RemoteCause(Exception):
    """The cause of an error that was raised in another process: the traceback of that process as text."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}" if self.args else ""


class FedFleetError(Exception):
    """The base of all errors that this package raises on purpose.

    When an error is sent to another process, its cause travels with it as text.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self.args, self.pickled_state()

    def pickled_state(self) -> dict[str, Any]:
        """The attributes that unpickling sets in addition to the arguments: the cause, if there is one."""
        cause = self.__cause__
        if cause is None:
            return {}
        return {"__cause__": cause if isinstance(cause, RemoteCause) else RemoteCause(full_traceback(cause))}


class OneSentence(FedFleetError):
    """An error whose message says everything that its reader needs. A notebook shows it without a traceback."""

    def _render_traceback_(self) -> list[str]:
        """What IPython shows instead of a traceback."""
        return [f"{type(self).__name__}: {self}"]


class ConfigError(OneSentence, ValueError):
    """The experiment cannot be run as it is written. Commands end with status 2."""


class InUse(ConfigError):
    """Another process writes to the folder."""


class Diverged(FedFleetError):
    """The server's model is no longer finite."""

    round: int
    detail: str
    remedy: str

    def __init__(self, round: int, detail: str, remedy: str = "lower the step size") -> None:
        super().__init__(f"diverged in round {round}: {detail}; {remedy}")
        self.round, self.detail, self.remedy = round, detail, remedy

    def __reduce__(self) -> tuple[Any, ...]:
        return Diverged, (self.round, self.detail, self.remedy), self.pickled_state()


class ClientFailed(FedFleetError):
    """Local work failed twice, and failed again for these clients alone.

    `clients` are all clients of the task if none of them fails alone.
    """

    round: int
    clients: tuple[int, ...]
    cause: str
    where: str

    def __init__(self, round: int, clients: tuple[int, ...], cause: str, where: str) -> None:
        who = f"client {clients[0]}" if len(clients) == 1 else f"clients {', '.join(map(str, clients))}"
        super().__init__(f"round {round}: {who} failed on {where}: {cause}; see the setting engine.on_failure")
        self.round, self.clients, self.cause, self.where = round, clients, cause, where

    def __reduce__(self) -> tuple[Any, ...]:
        return ClientFailed, (self.round, self.clients, self.cause, self.where), self.pickled_state()


class MethodFailed(FedFleetError):
    """A function of the method that runs on the server raised an exception."""


class TooFewMessages(FedFleetError):
    """So many clients were left out of a round that the rule of aggregation cannot be applied to the rest."""


class EvaluationFailed(FedFleetError):
    """The evaluation of a slice of the test set failed twice."""


class WorkersLost(FedFleetError):
    """Workers die as fast as they are replaced, or no worker is left."""


class WorkersUnfit(WorkersLost):
    """All workers of a pool were given up, because their environment cannot run any client of this run."""


class WorkerUnfit(FedFleetError):
    """The machine or environment of a worker cannot run any client of this run.

    Kernels, a package, a plug-in or memory are missing there. No client is the reason. The worker is given up.
    """


class OutOfMemory(FedFleetError):
    """A client alone, or the server, needs more memory than there is."""


class DeviceLost(FedFleetError):
    """The device failed under the process of the run, which can do nothing more with it."""


class BlockTooLarge(FedFleetError):
    """A block of clients needs more memory of a device than there is, twice. The driver goes on with smaller blocks."""


class NoRoom(FedFleetError):
    """The nodes of the cluster are large enough for the workers, but other jobs hold what the workers need."""


class RowsLost(FedFleetError):
    """States of clients were lost with the node that held them. The driver goes back to its last checkpoint."""


class StoreFull(FedFleetError):
    """The disk has no space for the clients' states, or for the files that a run writes when it ends."""


class NotSaved(FedFleetError):
    """The run is over, but its result could not be written."""


class DriverDied(FedFleetError):
    """The process of the driver is gone. The checkpoints that it wrote remain."""


class Interrupted(OneSentence):
    """A signal asked the run to stop.

    `signal`: its number. `detail`: how to continue, as the end of a sentence, or "".
    """

    signal: int
    detail: str

    def __init__(self, signal: int, detail: str = "") -> None:
        super().__init__(f"interrupted{detail}")
        self.signal, self.detail = signal, detail

    def __reduce__(self) -> tuple[Any, ...]:
        return Interrupted, (self.signal, self.detail), self.pickled_state()


WORDS = {
    "alpha": "beta",  # of the Dirichlet distribution
    "concentration": "beta",
    "lr": "rule.lr",
    "learning_rate": "rule.lr",
    "optimizer": "rule",
    "optimiser": "rule",
    "num_rounds": "rounds",
    "communication_rounds": "rounds",
    "num_clients": "clients",
    "n_clients": "clients",
    "clients_per_round": "cohort",
    "local_epochs": "epochs",
    "local_steps": "steps",
    "batch_size": "batch",
    "dataset": "workload",
    "algorithm": "method",
    "parquet": "table",  # the workload of earlier versions
}
"""What papers, other simulators and earlier versions call a setting or a part -> its name here."""


def nearest(name: str, names: Iterable[str], elsewhere: Iterable[str] = ()) -> str:
    """A clause for a message about an unknown name: the valid name that is meant, then all valid names.

    That is the one for which the literature has this word, or one of that name in another place, or the most similar
    one. elsewhere: dotted names in other places.
    """
    names, word = list(names), WORDS.get(name.lower(), "")
    if word.partition(".")[0] in names:
        close = [word]
    else:
        close = [each for each in elsewhere if f".{each}".endswith(f".{word or name}")]
    close = close or get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    return f"{hint}{'valid: ' if names else 'none is known'}{', '.join(names)}"

"""Errors that a user can act on: one sentence with the key, the value and the remedy."""

from __future__ import annotations

import traceback
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

LONGEST = 16_000
"""Characters of a traceback that travel from one process to another."""


def whole(error: BaseException) -> str:
    """The traceback as Python prints it, with its causes; of a very long one the beginning and the end."""
    if isinstance(error, Remote):
        return str(error).strip()
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__)).rstrip()
    if len(text) <= LONGEST:
        return text
    half = LONGEST // 2
    return f"{text[:half]}\n…\n{text[-half:]}"


class Remote(Exception):
    """The cause of an error that was raised in another process: that process's traceback, as text."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}" if self.args else ""


class FedFleetError(Exception):
    """Base of all errors raised on purpose. Its cause travels with it to other processes, as text."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self.args, self.kept()

    def kept(self) -> dict[str, Any]:
        """What unpickling sets beside the arguments."""
        cause = self.__cause__
        return {} if cause is None else {"__cause__": cause if isinstance(cause, Remote) else Remote(whole(cause))}


class ConfigError(FedFleetError, ValueError):
    """The experiment cannot be run as it is written. Commands end with status 2."""


class InUse(ConfigError):
    """Another process writes in the folder."""


class Diverged(FedFleetError):
    """The server's model is no longer finite."""

    def __init__(self, round: int, detail: str, remedy: str = "lower the step size") -> None:
        super().__init__(f"diverged in round {round}: {detail}; {remedy}")
        self.round, self.detail, self.remedy = round, detail, remedy

    def __reduce__(self) -> tuple[Any, ...]:
        return Diverged, (self.round, self.detail, self.remedy), self.kept()


class ClientFailed(FedFleetError):
    """Local work failed twice, and again for these clients alone (all of a task's, where none fails alone)."""

    def __init__(self, round: int, clients: tuple[int, ...], cause: str, where: str) -> None:
        who = f"client {clients[0]}" if len(clients) == 1 else f"clients {', '.join(map(str, clients))}"
        super().__init__(f"round {round}: {who} failed on {where}: {cause}; see engine.on_failure to go on without")
        self.round, self.clients, self.cause, self.where = round, clients, cause, where

    def __reduce__(self) -> tuple[Any, ...]:
        return ClientFailed, (self.round, self.clients, self.cause, self.where), self.kept()


class MethodFailed(FedFleetError):
    """A function of the method's that runs on the server raised."""


class EvaluationFailed(FedFleetError):
    """A slice of the test set failed twice."""


class WorkersLost(FedFleetError):
    """Workers die as fast as they are replaced, or none is left."""


class WorkerUnfit(FedFleetError):
    """A worker's machine or environment cannot run any client of this run: kernels, a package, a plug-in or memory are
    wanting there. No client is to blame; the worker is given up."""


class OutOfMemory(FedFleetError):
    """A client alone, or the server, needs more memory than there is."""


class NoRoom(FedFleetError):
    """The cluster's nodes could have the workers, but others hold what they need."""


class RowsLost(FedFleetError):
    """Clients' states are gone with the node that had them; the driver goes back to its last checkpoint."""


class StoreFull(FedFleetError):
    """No room for the clients' states, or for what a run writes when it ends."""


class NotSaved(FedFleetError):
    """The run is over, and its result could not be written."""


class DriverDied(FedFleetError):
    """The driver's process is gone; what was checkpointed is not."""


class Interrupted(FedFleetError):
    """Asked to stop by a signal."""

    def __init__(self, signal: int, detail: str = "") -> None:
        super().__init__(f"interrupted{detail}")
        self.signal, self.detail = signal, detail

    def __reduce__(self) -> tuple[Any, ...]:
        return Interrupted, (self.signal, self.detail), self.kept()


def nearest(name: str, names: Iterable[str]) -> str:
    """A clause for an unknown name: the nearest valid one, and all there are."""
    names = list(names)
    close = get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]}? " if close else ""
    return f"{hint}{'valid: ' if names else 'none is known'}{', '.join(names)}"

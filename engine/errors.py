"""Errors that a user can act on: one sentence with the key, the value and the remedy."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class FedFleetError(Exception):
    """Base of all errors raised on purpose."""


class ConfigError(FedFleetError, ValueError):
    """The experiment cannot be run as it is written. Commands end with status 2."""


class Diverged(FedFleetError):
    """The server's model is no longer finite."""

    def __init__(self, round: int, detail: str) -> None:
        super().__init__(f"diverged in round {round}: {detail}; lower the step size")
        self.round = round
        self.detail = detail

    def __reduce__(self) -> tuple[type, tuple[int, str]]:
        return Diverged, (self.round, self.detail)


class ClientFailed(FedFleetError):
    """A client's local work raised."""

    def __init__(self, round: int, clients: tuple[int, ...], cause: str) -> None:
        who = f"client {clients[0]}" if len(clients) == 1 else f"one of the clients {list(clients)}"
        super().__init__(f"round {round}: {who} failed: {cause}")
        self.round, self.clients, self.cause = round, clients, cause

    def __reduce__(self) -> tuple[type, tuple[int, tuple[int, ...], str]]:
        return ClientFailed, (self.round, self.clients, self.cause)


def nearest(name: str, names: Iterable[str]) -> str:
    """A clause for an unknown name: the nearest valid one, and all there are."""
    names = list(names)
    close = get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]}? " if close else ""
    return f"{hint}{'valid: ' if names else 'none is known'}{', '.join(names)}"

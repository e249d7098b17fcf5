"""The parts of a fleet that experiments choose by name, and the draws that all of them use.

Every draw is a function of (seed, purpose, client, number). The number is that of the round, or of a dispatch in an
asynchronous run; it is left out where a client keeps what it has drawn. No draw depends on how many other clients are
asked, on earlier draws, or on a worker. Clients are given by their numbers, (c,) int64, and times are virtual seconds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, get_args

import numpy as np
import torch

from ...workloads import counted

Unit = Literal["forward", "example", "step", "visit"]
"""What `compute` milliseconds are for: the forward pass of one example, of which training takes three; the forward and
backward pass of one example; one local step; or all local steps of a visit."""


def keys(seed: int, purpose: str, clients: np.ndarray, *numbers: int | np.ndarray) -> np.ndarray:
    """(c,) int64: the keys of one draw per client."""
    return np.ascontiguousarray(counted.key(seed, purpose, clients.astype(np.int64), *numbers))


def uniform(keys: np.ndarray) -> np.ndarray:
    """(c,) float64 in [0, 1), from keys (c,)."""
    return counted.uniform(torch.from_numpy(keys), 1)[:, 0].numpy()


def normal(keys: np.ndarray) -> np.ndarray:
    """(c,) float64, standard normal, from keys (c,)."""
    return counted.normal(torch.from_numpy(keys), 1)[:, 0].numpy()


def require(condition: bool, text: str) -> None:
    """Raise ValueError with `text`, which has the condition, the value and the remedy, unless the condition holds."""
    if not condition:
        raise ValueError(text)


def positive(**values: float) -> None:
    for name, value in values.items():
        require(value > 0, f"{name} > 0 must hold, got {value}; choose a positive number")


def nonnegative(**values: float) -> None:
    for name, value in values.items():
        require(value >= 0, f"{name} >= 0 must hold, got {value}; choose 0 or more")


def probability(**values: float) -> None:
    for name, value in values.items():
        require(0 <= value <= 1, f"0 <= {name} <= 1 must hold, got {value}; choose a probability")


class Distribution(ABC):
    """A distribution of positive numbers, such as milliseconds or kbit/s."""

    table: ClassVar[str] = "DISTRIBUTIONS"

    @abstractmethod
    def draw(self, keys: np.ndarray) -> np.ndarray:
        """(c,) float64, a number for each key (c,)."""


class DeviceNumbers(NamedTuple):
    """What some clients' devices are like; every array is (c,) float64."""

    compute: np.ndarray  # milliseconds for each unit of work
    down: np.ndarray  # kbit/s, 1 kbit = 1000 bit
    up: np.ndarray  # kbit/s
    memory: np.ndarray  # bytes, infinite where it is unknown


@dataclass(frozen=True)
class Devices(ABC):
    """The devices of all clients. `unit`: what `compute` is measured for."""

    table: ClassVar[str] = "DEVICES"

    unit: Unit = "forward"

    def __post_init__(self) -> None:
        require(self.unit in get_args(Unit), f"unit must be one of {', '.join(get_args(Unit))}, got {self.unit!r}")

    @abstractmethod
    def numbers(self, seed: int, clients: np.ndarray, number: int | np.ndarray) -> DeviceNumbers:
        """The devices of these clients (c,) on their visit with this number: one for all, or (c,)."""

    def check(self, clients: int) -> None:  # noqa: B027 most parts have nothing to check
        """Raise ValueError where the part has no device for one of the clients 0 … clients - 1."""

    @property
    def limits_memory(self) -> bool:
        """Whether any client's memory is known."""
        return False

    @property
    def constant(self) -> bool:
        """Whether a client's device is the same on every visit."""
        return False


class Availability(ABC):
    """When clients are online: three pure functions of time. There is no cursor and no history."""

    table: ClassVar[str] = "AVAILABILITIES"
    always: ClassVar[bool] = False
    """Whether every client is online at all times."""

    def check(self, clients: int) -> None:  # noqa: B027 most parts have nothing to check
        """Raise ValueError where the part does not know when one of the clients 0 … clients - 1 is online."""

    @abstractmethod
    def online(self, seed: int, clients: np.ndarray, t: float | np.ndarray) -> np.ndarray:
        """(c,) bool: whether each client is online at time t, one for all or (c,)."""

    @abstractmethod
    def until(self, seed: int, clients: np.ndarray, t: float | np.ndarray) -> np.ndarray:
        """(c,) the end of the session that contains t; t itself for a client that is offline. May be infinite."""

    @abstractmethod
    def next(self, seed: int, clients: np.ndarray, t: float | np.ndarray) -> np.ndarray:
        """(c,) t for a client that is online, else the start of its next session, infinite if there is none."""


class WorkRequest(NamedTuple):
    """What a part that shortens local work may depend on; the arrays are (c,)."""

    seed: int
    clients: np.ndarray
    number: int | np.ndarray
    full: np.ndarray  # the number of local steps of a whole visit
    batches: np.ndarray  # the number of batches in one pass over a client's rows
    compute: np.ndarray  # milliseconds of the client's device for each unit of work


class LocalWork(ABC):
    """How much of its local work a client does on a visit."""

    table: ClassVar[str] = "LOCAL_WORK"
    whole: ClassVar[bool] = False
    """Whether every client always does all of it."""

    @abstractmethod
    def steps(self, request: WorkRequest) -> np.ndarray:
        """(c,) int64, from 1 to request.full: the number of local steps that each client takes."""

    def check(self, epochs: int | None) -> None:  # noqa: B027 most parts have nothing to check
        """Raise ValueError where the part does not fit the federation's local work. epochs: of it, None if it is given
        in steps."""

"""The contract of a noise mechanism: the noise of every round, and what a client's messages cost under it.

Round t's sum of clipped messages gets the noise z C n_t, where z is the noise multiplier, C the bound on one client's
message, and n_t what the mechanism makes of standard normal numbers. The numbers are counted: each is drawn from a key
of its own, again whenever it is needed, so that a round that is repeated has the same noise.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

from torch import Tensor


class Draw(Protocol):
    """`draw(purpose, *where)`: standard normal numbers in float64, one tensor for each leaf of a message. They are a
    function of the run's seed and the arguments only."""

    def __call__(self, purpose: str, *where: int) -> list[Tensor]: ...


class Composition(NamedTuple):
    """What t rounds are to an accountant: `times` Gaussian releases, each of a sum whose sensitivity is `sensitivity`
    times C, with noise z C. `sampled`: whether each release is of a random sample of the clients, which hides a
    client."""

    times: int
    sensitivity: float = 1.0
    sampled: bool = True


class Mechanism(ABC):
    """Noise over the rounds of a run."""

    table: ClassVar[str] = "MECHANISMS"
    """The registry's table of such parts."""
    samplers: ClassVar[tuple[str, ...]] = ("turns",)
    """The names of `federation.sampler` for which `composition` is right."""

    def check(self, rounds: int, separation: int | None) -> None:
        """Raise ValueError if the settings do not fit a run. `separation`: the fewest rounds from one turn of a client
        to its next; None if a client may take part in any round."""
        return None

    def init(self, zeros: Sequence[Tensor], rounds: int) -> Any:
        """The state before round 1; () for none. `zeros`: a float64 tensor for each leaf of a message."""
        return ()

    @abstractmethod
    def noise(self, t: int, draw: Draw, state: Any) -> tuple[list[Tensor], Any]:
        """(n_t for each leaf, the state after round t), from the state after round t - 1. t counts from 1."""

    @abstractmethod
    def deviation(self, t: int, rounds: int) -> float:
        """The standard deviation of one coordinate of n_t, in a run of so many rounds."""

    @abstractmethod
    def composition(self, t: int, separation: int | None, rounds: int) -> Composition:
        """What the first t rounds are to an accountant, in a run of so many rounds. `separation`: see `check`."""

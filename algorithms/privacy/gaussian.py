"""The Gaussian mechanism: independent noise in every round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from .mechanism import Composition, Draw, Mechanism


@dataclass(frozen=True)
class Gaussian(Mechanism):
    """n_t = Z_t, independent standard normal numbers."""

    samplers: ClassVar[tuple[str, ...]] = ("binomial", "uniform", "turns")

    def noise(self, t: int, draw: Draw, state: Any) -> tuple[list[Tensor], Any]:
        return draw("noise", t), state

    def deviation(self, t: int, rounds: int) -> float:
        return 1.0

    def composition(self, t: int, separation: int | None, rounds: int) -> Composition:
        return Composition(t if separation is None else turns(t, separation))


def turns(t: int, separation: int) -> int:
    """The most rounds among the first t in which one client can take part."""
    return -(-t // separation)

"""ALIE or min-max with the deviation negated on the first half of the coordinates, against rules that count signs."""

from __future__ import annotations

from typing import Literal

from .alie import Alie
from .min_max import MinMax


def half_negated(
    of: Literal["alie", "min_max"] = "alie",
    z: float | Literal["max"] = 1.5,
    sign: Literal["-", "+"] = "-",
    share: float | None = None,
    clients: tuple[int, ...] | None = None,
    knows: Literal["honest", "own"] = "honest",
    rounds: str | None = None,
) -> Alie | MinMax:
    """ALIE or min-max, negated on half the coordinates. of: the attack, `alie` or `min_max`. z: standard deviations, of
    alie. sign: the direction, of alie."""
    if of == "min_max":
        return MinMax(negated=True, share=share, clients=clients, knows=knows, rounds=rounds)
    return Alie(z=z, sign=sign, negated=True, share=share, clients=clients, knows=knows, rounds=rounds)

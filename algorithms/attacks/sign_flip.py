"""Sign flip: -k times the client's own message, or -k times the mean of the messages that the attacker knows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from torch import Tensor

from .contract import CohortAttack, Columns, OwnAttack, Plan, Sender


@dataclass(frozen=True, kw_only=True)
class SignFlip(OwnAttack):
    """k: the factor."""

    k: float = 1.0
    called: ClassVar[str] = "sign_flip"

    def send(self, own: Tensor, sender: Sender) -> Tensor:
        return -self.k * own


@dataclass(frozen=True, kw_only=True)
class SignFlipOfMean(CohortAttack):
    """k: the factor of the mean."""

    k: float = 1.0
    called: ClassVar[str] = "sign_flip"

    def forge(self, columns: Columns, plan: Plan, byzantine: int) -> np.ndarray:
        return -self.k * columns.mean


def sign_flip(
    k: float = 1.0,
    of: Literal["own", "mean"] = "own",
    share: float | None = None,
    clients: tuple[int, ...] | None = None,
    knows: Literal["honest", "own"] = "honest",
    rounds: str | None = None,
) -> SignFlip | SignFlipOfMean:
    """The sign flip. k: the factor. of: what it is of, the client's own message or the mean of those it knows."""
    kind = SignFlipOfMean if of == "mean" else SignFlip
    return kind(k=k, share=share, clients=clients, knows=knows, rounds=rounds)

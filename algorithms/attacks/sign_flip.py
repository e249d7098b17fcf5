"""Sign flip: -k times the client's own message, -k times the mean of the messages that the attacker knows, or local
training with -k times every gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from torch import Tensor

from .contract import CohortAttack, Columns, OwnAttack, PoisoningAttack, Sender


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

    def forge(self, x: Columns) -> np.ndarray:
        return -self.k * x.mean


@dataclass(frozen=True, kw_only=True)
class SignFlipOfGradients(PoisoningAttack):
    """k: the factor of every gradient. The clients send what comes out."""

    k: float = 1.0

    workload: ClassVar[str] = "gradients_flipped"
    called: ClassVar[str] = "sign_flip"

    def arguments(self) -> dict[str, Any]:
        return {"k": self.k}


def sign_flip(
    k: float = 1.0,
    of: Literal["own", "mean", "gradients"] = "own",
    share: float | None = None,
    clients: tuple[int, ...] | None = None,
    knows: Literal["honest", "own"] = "honest",
    rounds: str | None = None,
) -> SignFlip | SignFlipOfMean | SignFlipOfGradients:
    """The sign flip. k: the factor. of: what it is of, the client's own message, the mean of those it knows, or every
    gradient of its local training."""
    kinds = {"own": SignFlip, "mean": SignFlipOfMean, "gradients": SignFlipOfGradients}
    return kinds[of](k=k, share=share, clients=clients, knows=knows, rounds=rounds)

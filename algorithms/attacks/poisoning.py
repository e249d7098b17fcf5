"""Attacks on the training data of Byzantine clients.

label_flip   label l becomes C - 1 - l
backdoor     some rows get a trigger and a target label (Bagdasaryan et al., AISTATS 2020, arXiv:1807.00459); the
             message is scaled by gamma, so that the mean lands on the attackers' model
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from .contract import PoisoningAttack, Sender


@dataclass(frozen=True, kw_only=True)
class LabelFlip(PoisoningAttack):
    """Byzantine clients train on flipped labels and send what comes out."""

    workload: ClassVar[str] = "label_flipped"
    called: ClassVar[str] = "label_flip"


@dataclass(frozen=True, kw_only=True)
class Backdoor(PoisoningAttack):
    """poison: the probability that a training row gets the trigger. size, value: side and value of the square at the
    top left; value None: the largest input. target: the label. scale: "replace": gamma = S / (B server_lr), or a
    number. server_lr: the method's. bound: gamma is at most bound / |message|."""

    poison: float = 0.32
    size: int = 5
    value: float | None = None
    target: int = 0
    scale: float | Literal["replace"] = "replace"
    server_lr: float = 1.0
    bound: float | None = None

    workload: ClassVar[str] = "backdoored"
    called: ClassVar[str] = "backdoor"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scale != "replace" and not self.scale > 0:
            raise ValueError(f"scale > 0 must hold, got scale={self.scale}")
        if not self.server_lr > 0:
            raise ValueError(f"server_lr > 0 must hold, got server_lr={self.server_lr}")
        if self.bound is not None and not self.bound > 0:
            raise ValueError(f"bound > 0 must hold, got bound={self.bound}")

    @property
    def sends(self) -> bool:
        return self.scale != 1.0 or self.bound is not None

    def arguments(self) -> dict[str, Any]:
        return {"poison": self.poison, "size": self.size, "value": self.value, "target": self.target}

    def send(self, own: Tensor, sender: Sender) -> Tensor:
        replaces = self.scale == "replace"
        gamma = sender.cohort / (sender.byzantine * self.server_lr) if replaces else float(self.scale)
        factor = torch.tensor(gamma, dtype=torch.float64)
        if self.bound is not None:
            norm = torch.linalg.vector_norm(own, dtype=torch.float64)
            factor = torch.minimum(factor, self.bound / norm)
        return own * factor.to(own.dtype)

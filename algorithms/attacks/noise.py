"""The client's own message plus N(0, std^2) in every coordinate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ...workloads import counted
from .contract import OwnAttack, Sender


@dataclass(frozen=True, kw_only=True)
class Noise(OwnAttack):
    """std: of every coordinate."""

    std: float = 0.5
    called: ClassVar[str] = "noise"

    def send(self, own: Tensor, sender: Sender) -> Tensor:
        return own + self.std * counted.normal(sender.key, own.numel()).to(own.dtype)

"""Messages that are the same number in every coordinate: zero, infinity, or not a number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .contract import OwnAttack, Sender


@dataclass(frozen=True, kw_only=True)
class Constant(OwnAttack):
    """value: of every coordinate."""

    value: ClassVar[float]

    def send(self, own: Tensor, sender: Sender) -> Tensor:
        return torch.full_like(own, self.value)


@dataclass(frozen=True, kw_only=True)
class Zero(Constant):
    """The message is 0."""

    value: ClassVar[float] = 0.0
    called: ClassVar[str] = "zero"


@dataclass(frozen=True, kw_only=True)
class Infinite(Constant):
    """Every coordinate is infinity."""

    value: ClassVar[float] = float("inf")
    called: ClassVar[str] = "infinite"


@dataclass(frozen=True, kw_only=True)
class NotANumber(Constant):
    """Every coordinate is not a number."""

    value: ClassVar[float] = float("nan")
    called: ClassVar[str] = "nan"

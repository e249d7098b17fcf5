"""Torch's own kernels, whose calls may be replayed from recordings."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from .contract import Kernels
from .tape import Tapes


@dataclass(frozen=True)
class Torch(Kernels):
    """Torch's kernels. On a processor, gradients of clients alone are replayed to the same bits."""

    name: ClassVar[str] = "torch"
    needs_proof: ClassVar[bool] = False

    def tapes(self, device: torch.device, most_bytes: float = math.inf) -> Tapes | None:
        return Tapes(most_bytes) if device.type == "cpu" else None

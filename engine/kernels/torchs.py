"""Torch's own kernels, whose calls may be replayed from recordings."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from .block_convolutions import products, with_products
from .contract import Kernels
from .tape import Tapes


@dataclass(frozen=True)
class Torch(Kernels):
    """Torch's kernels. products: the numbers of those convolutions of a block that are products, see
    `block_convolutions`. On a processor, gradients of clients alone are replayed to the same bits."""

    name: ClassVar[str] = "torch"
    needs_proof: ClassVar[bool] = False
    products: tuple[int, ...] = ()

    def __str__(self) -> str:
        return with_products(self.name, self.products)

    def around_losses(self) -> AbstractContextManager[Any]:
        return products(self.products) if self.products else nullcontext()

    def tapes(self, device: torch.device, most_bytes: float = math.inf) -> Tapes | None:
        return Tapes(most_bytes) if device.type == "cpu" else None

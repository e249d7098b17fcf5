"""Any workload with coupled weight decay: decay * p is added to every gradient, wherever a method takes one.

That is the gradient of decay |p|^2 / 2. Decoupled decay, p <- (1 - lr decay) p, is a setting of some rules instead; for
plain steps both are the same. Methods that take two gradients on a batch have it in both, each at its own point, and
control variates hold it. The dual group of a min-max workload is left alone; reported losses are the inner workload's.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from torch import Tensor

from .base import Batch, Params
from .wrapped import Wrapped, unseen


@dataclass(frozen=True)
class Regularised(Wrapped):
    """`of`: the workload."""

    decay: float = 1e-4

    def __post_init__(self) -> None:
        if not 0 <= self.decay < inf:
            raise ValueError(f"0 <= decay < infinity must hold, got decay={self.decay}")

    def losses(self, p: Params, batch: Batch) -> Tensor:
        free = (value for name, value in p.items() if name not in self.of.buffers and not name.startswith("dual."))
        half = sum((value.square().sum() for value in free), start=next(iter(p.values())).new_zeros(()))
        return super().losses(p, batch) + unseen(self.decay / 2 * half)

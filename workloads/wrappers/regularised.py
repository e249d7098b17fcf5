"""Any workload with coupled weight decay: decay * p, the gradient of decay |p|^2 / 2, is added to every gradient.

Decoupled weight decay, p <- (1 - lr decay) p, is a setting of some rules instead; for plain steps both are the same.
Every gradient that a method takes has the decay, at the point where it is taken, and so have control variates. The dual
group of a min-max workload does not decay. Reported losses are those of the inner workload.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..settings import check_finite_from
from ..workload import Batch, Params
from .wrapped import Wrapped, unseen


@dataclass(frozen=True)
class Regularised(Wrapped):
    """`of`: the inner workload. `decay`: the factor of p in the gradient."""

    decay: float = 1e-4

    def __post_init__(self) -> None:
        check_finite_from(self, decay=0)

    def losses(self, p: Params, batch: Batch) -> Tensor:
        free = (value for name, value in p.items() if name not in self.of.buffers and not name.startswith("dual."))
        half = sum((value.square().sum() for value in free), start=next(iter(p.values())).new_zeros(()))
        return super().losses(p, batch) + unseen(self.decay / 2 * half)

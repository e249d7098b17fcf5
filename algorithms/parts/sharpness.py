"""The gradient at the worst point nearby, of FedSAM, FedASAM and MoFedSAM.

Foret et al., ICLR 2021, arXiv:2010.01412 (SAM); Kwon et al., ICML 2021, arXiv:2102.11600 (ASAM).

    sam    e = rho g(y) / (|g(y)| + 1e-16)
    asam   e = rho T^2 g(y) / (|T g(y)| + 1e-16),   T = |y| + eta in tensors whose name ends in `weight`, else 1
    the gradient of a step is g(y + e), on the batch of g(y)

|.| is the norm over all parameters as one vector. Running statistics of BatchNorm are those of the first gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ..contract import Oracle
from ..tree import Tree
from .checks import nonnegative, one_of
from .numbers import quotient

Kind = Literal["sam", "asam"]

TINY = 1e-16
"""Added to the norm of the gradient, which may be 0."""


@dataclass(frozen=True)
class Sharpness:
    """Where the worst point is looked for. `rho`: its distance; `kind`: the norm of the distance; `eta`: of asam."""

    rho: float = 0.05
    kind: Kind = "sam"
    eta: float = 0.2

    def __post_init__(self) -> None:
        nonnegative(rho=self.rho, eta=self.eta)
        one_of("sam", "asam", kind=self.kind)

    def around(self, oracle: Oracle) -> Oracle:
        """The oracle that takes two gradients of `oracle`, the second one at the worst point near y."""
        return WorstNearby(oracle, self)

    def away(self, y: Tree, g: Tree) -> Tree:
        """e, from the gradient g at y."""
        if self.kind == "sam":
            return g * quotient(self.rho, g.norm() + TINY)
        scale = y.map(lambda name, leaf: leaf.abs() + self.eta if name.endswith("weight") else torch.ones_like(leaf))
        scaled = scale * g
        return scale * scaled * quotient(self.rho, scaled.norm() + TINY)


class WorstNearby:
    """The oracle of `Sharpness.around`."""

    key: Tensor
    done: Tensor
    examples: Tensor

    def __init__(self, oracle: Oracle, sharpness: Sharpness) -> None:
        self.oracle, self.sharpness = oracle, sharpness

    def __call__(self, y: Tree, /) -> Tree:
        return self.oracle(y + self.sharpness.away(y, self.oracle(y)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.oracle, name)

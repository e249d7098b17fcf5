"""A weight of a network with two trained factors of low rank beside it, as the other layers know it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from torch import Tensor


class Pair(NamedTuple):
    """The network computes with W + scale B A in the place of W.

    `weight`, `a`, `b`: the names of W, (m, n), A, (r, n), and B, (m, r); for a convolution n stands for its further
    axes. `transposed`: W is stored as (n, m). `drawn`: the factor that is drawn where factors begin; the other one is
    0. `tied`: whether W has further places in the network, without these factors.
    """

    weight: str
    a: str
    b: str
    scale: float
    transposed: bool = False
    drawn: Literal["a", "b"] = "a"
    tied: bool = False

    def change(self, p: Any, shape: Sequence[int]) -> Tensor:
        """scale B A, as W is stored. p: name -> tensor; shape: of W."""
        product = p[self.b].flatten(1) @ p[self.a].flatten(1)
        return self.scale * (product.T if self.transposed else product).reshape(shape)

"""A weight of a network with two trained factors of low rank beside it, as the other layers know it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class Ranks(NamedTuple):
    """Ranks that differ from client to client. Client i has the rank r_i = ranks[i mod length] and the scale s_i =
    scales[i mod length]: of the factors it has the first r_i rows of A and columns of B, and all others are 0."""

    ranks: tuple[int, ...]
    scales: tuple[float, ...]

    def rank(self, client: int) -> int:
        """r_i."""
        return self.ranks[client % len(self.ranks)]

    def of(self, number: Tensor) -> tuple[Tensor, Tensor]:
        """(r_i, int64; s_i / s, float64), both (); s is the scale of the largest rank. number: (), the client's."""
        place = number % len(self.ranks)
        largest = self.scales[self.ranks.index(max(self.ranks))]
        ranks = torch.tensor(self.ranks, device=number.device)
        ratios = [scale / largest for scale in self.scales]
        return ranks[place], torch.tensor(ratios, dtype=torch.float64, device=number.device)[place]

    def mean(self, clients: int) -> float:
        """The mean rank of clients 0, 1, … of a run."""
        return sum(self.rank(client) for client in range(clients)) / clients


class Pair(NamedTuple):
    """The network computes with W + scale B A in the place of W.

    `weight`, `a`, `b`: the names of W, (m, n), A, (r, n), and B, (m, r); for a convolution n stands for its further
    axes. `transposed`: W is stored as (n, m). `drawn`: the factor that is drawn where factors begin; the other one is
    0. `tied`: whether W has further places in the network, without these factors. `ranks`: those of the clients, of
    which r is the largest; None where all clients have r. `rows`: the first of the outputs that have these factors,
    and the one behind the last; None for all m outputs.
    """

    weight: str
    a: str
    b: str
    scale: float
    transposed: bool = False
    drawn: Literal["a", "b"] = "a"
    tied: bool = False
    ranks: Ranks | None = None
    rows: tuple[int, int] | None = None

    def change(self, p: Any, shape: Sequence[int]) -> Tensor:
        """scale B A, as W is stored. p: name -> tensor; shape: of W."""
        product = p[self.b].flatten(1) @ p[self.a].flatten(1)
        if self.rows is not None:
            outputs, (begin, end) = shape[-1 if self.transposed else 0], self.rows
            product = F.pad(product, (0, 0, begin, outputs - end))
        return self.scale * (product.T if self.transposed else product).reshape(shape)

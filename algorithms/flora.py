"""FLoRA: the products of all clients' factors are added to the weights, and new factors begin in every round.

Wang et al. 2024, arXiv:2409.05976.

Choose it to fine-tune with adapters where the mean of the clients' models should be exact and its rank should grow from
round to round. After the first round a client receives the factors of a whole cohort.

    A_i, B_i <- local steps from A, B = 0                   beside W
    W        <- W + mean of s B_i A_i
    A        <- drawn anew, the same for all clients;  B <- 0

The authors stack the factors, [w_1 A_1; w_2 A_2; ...] and [B_1 | B_2 | ...], which has the same product. New factors
are drawn from the seed and the round: A uniformly from +-1 / sqrt(fan_in), for embeddings B from the standard normal
distribution. The first ones are those of the adapter.

Departures:
- In the authors' code every client draws an A of its own.
- Means have the federation's client weights, uniform unless it says otherwise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ..workloads import counted
from .fedavg import Plain
from .local import Carry, Rule
from .parts.exact_mean import ExactMean, OfAdapters
from .parts.rules import adamw
from .parts.servers import Mean
from .tree import Tree


@dataclass(frozen=True)
class Flora(ExactMean):
    """The method."""

    sends_factors = False

    def next_factors(self, x: Tree, round: int) -> Tree:
        found = dict(x.items())
        for number, pair in enumerate(self.pairs):
            drawn, zero = (pair.a, pair.b) if pair.drawn == "a" else (pair.b, pair.a)
            found[zero] = torch.zeros_like(found[zero])
            shape, key = found[drawn].shape, counted.key(self.seed, "adapter", number, pair.drawn, round)
            if pair.drawn == "a":
                new = (2 * counted.uniform(key, shape.numel()) - 1) / math.sqrt(shape[1:].numel())
            else:
                new = counted.normal(key, shape.numel())
            found[drawn] = new.view(shape).to(found[drawn])
        return Tree.join(x.layout, found)


def flora(rule: Rule = adamw(3e-4), carry: Carry = "reset") -> OfAdapters:
    """rule: the local optimiser; carry: only reset, as factors begin anew in every round."""
    if carry != "reset":
        raise ValueError(
            f"flora draws its factors anew in every round, so that no state can be kept, got carry={carry!r}; give "
            "carry: reset, or choose fedex_lora"
        )
    return OfAdapters(Flora(rule, Plain(), Mean()), "flora")

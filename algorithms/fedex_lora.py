"""FedEx-LoRA: means of both factors, and the weights take what the product of the means misses.

Singhal, Ponkshe, Vepakomma 2024, arXiv:2411.09432.

Choose it to fine-tune with adapters where the mean of the clients' models should be exact and factors should go on from
round to round, also with the state of their optimiser. After the first round a client receives the factors of a whole
cohort.

    A_i, B_i <- local steps from A, B                       beside W
    A, B     <- means of A_i, B_i
    W        <- W + s (mean of B_i A_i - B A)

The evaluated model W + s B A is the mean of the models W + s B_i A_i of the round. The means of the factors are those
of FedIT, which is FedAvg on adapters and leaves W as it is.

Departures:
- Means have the federation's client weights, uniform unless it says otherwise; the authors' code has plain ones.
- The authors' code adds the transposed change to every layer, which is right for GPT-2 alone; here each gets its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from .fedavg import Plain
from .local import Carry, Rule, check_carry
from .parts.exact_mean import ExactMean, OfAdapters
from .parts.rules import adamw
from .parts.servers import Mean
from .tree import Tree


@dataclass(frozen=True)
class FedexLora(ExactMean):
    """The method."""

    def next_factors(self, x: Tree, round: int) -> Tree:
        return x


def fedex_lora(rule: Rule = adamw(3e-4), carry: Carry = "reset") -> OfAdapters:
    """rule: the local optimiser; carry: what becomes of its state after a round, it is reset, kept by the client
    (keep), or averaged (average)."""
    check_carry(rule, carry)
    return OfAdapters(FedexLora(rule, Plain(), Mean(), carry), "fedex_lora")

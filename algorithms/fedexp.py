"""FedExP: the server extrapolates as far as the clients disagree.

Jhunjhunwala, Wang, Joshi, ICLR 2023, arXiv:2301.09604, Algorithm 1.

Choose it when you do not want to tune the server's step size: it grows with the disagreement of the clients, and is at
least 1. Each client sends one number more, and `epsilon` limits the step size where displacements are small.

    A <- mean |y_K - x|^2,  delta <- mean(y_K - x)
    x <- x + max(1, A / (2 (|delta|^2 + epsilon))) delta

Norms are over the whole model. The means have the federation's client weights, A as well as delta, so that A >=
|delta|^2 (Jensen); under a compression both are of the messages as they were decoded. The model is evaluated at the
mean of the last two iterates.

Uncertain: Takakura et al. 2025 write FedExP without max(1, .), which is floor = false. The authors' code has epsilon *
S where the paper has epsilon (give the product), and decays it by the square of the step size's decay (give a
schedule).

Departures:
- There is no step where |delta|^2 + epsilon = 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .contract import Round
from .local import LocalMethod, Rule, ServerRule
from .parts.adapted import Shown, Work, adapted
from .parts.checks import nonnegative
from .parts.compression import Compressed, Compression
from .parts.rules import Sgd
from .parts.servers import ratio
from .tree import Tree


@dataclass(frozen=True)
class Extrapolated(ServerRule):
    epsilon: float = 1e-3
    floor: bool = True

    uses_norm2 = True

    def __post_init__(self) -> None:
        nonnegative(epsilon=self.epsilon)

    def step(self, x: Tree, delta: Tree, norm2: Tensor, state: Any, round: Round) -> tuple[Tree, Any]:
        return x + delta * self.rate(x, delta, norm2, state, round), state

    def rate(self, x: Tree, delta: Tree, norm2: Tensor, state: Any, round: Round) -> Tensor:
        lr = ratio(norm2, 2 * (delta.norm2() + self.epsilon))
        return lr.clamp(min=1.0) if self.floor else lr


def fedexp(
    rule: Rule = Sgd(0.1),
    epsilon: float = 1e-3,
    floor: bool = True,
    local: Work = "plain",
    mu: float | None = None,
    evaluate: Shown = "last_two",
    compression: Compression | None = None,
) -> LocalMethod | Compressed:
    """rule: the local optimiser; floor: a step of 1 at least; local, mu, evaluate, compression: see `adapted`."""
    return adapted(Extrapolated(epsilon, floor), rule, local, mu, evaluate, compression)

"""FedExP-M: FedExP with momentum on the server.

Jhunjhunwala, Wang, Joshi, ICLR 2023, arXiv:2301.09604, in the form that the authors' code and Takakura et al. 2025
agree on.

Choose it where you would choose FedAvgM and do not want to tune the server's step size: it follows from the
displacements of the clients, as in FedExP, but may be less than 1. Each client sends one number more.

    A <- mean |y_K - x|^2,  delta <- mean(y_K - x)
    v <- beta v + delta,  R <- A + (beta / 2) R
    x <- x + R / (2 (|v|^2 + epsilon)) v

Norms are over the whole model. The means have the federation's client weights, A as well as delta, so that A >=
|delta|^2 (Jensen); under a compression both are of the messages as they were decoded. The model is evaluated at the
mean of the last two iterates.

Uncertain: the momentum branch of the authors' code is never reached; here it is in both lines. Their code has epsilon *
S where the paper has epsilon (give the product), and decays it by the square of the step size's decay (give a
schedule).

Departures:
- There is no step where |v|^2 + epsilon = 0.
- There is no max(1, .), as in the authors' recursion.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from .contract import Round
from .local import LocalMethod, Rule, ServerRule
from .parts.adapted import Shown, Work, adapted
from .parts.checks import fraction, nonnegative
from .parts.compression import Compressed, Compression
from .parts.rules import Sgd
from .parts.servers import ratio
from .tree import Tree


class Extrapolation(NamedTuple):
    v: Tree
    r: Tensor  # ()


@dataclass(frozen=True)
class ExtrapolatedMomentum(ServerRule):
    """State: v and R."""

    epsilon: float = 1e-3
    beta: float = 0.9

    uses_norm2 = True

    def __post_init__(self) -> None:
        nonnegative(epsilon=self.epsilon)
        fraction(beta=self.beta)

    def init(self, x: Tree) -> Extrapolation:
        return Extrapolation(x.zeros(), x.flat.new_zeros(()))

    def step(
        self, x: Tree, delta: Tree, norm2: Tensor, state: Extrapolation, round: Round
    ) -> tuple[Tree, Extrapolation]:
        after = self._after(delta, norm2, state)
        return x + after.v * self._rate(after), after

    def rate(self, x: Tree, delta: Tree, norm2: Tensor, state: Extrapolation, round: Round) -> Tensor:
        return self._rate(self._after(delta, norm2, state))

    def _after(self, delta: Tree, norm2: Tensor, state: Extrapolation) -> Extrapolation:
        return Extrapolation(delta.add(state.v, self.beta), norm2 + self.beta / 2 * state.r)

    def _rate(self, after: Extrapolation) -> Tensor:
        return ratio(after.r, 2 * (after.v.norm2() + self.epsilon))


def fedexp_m(
    rule: Rule = Sgd(0.1),
    epsilon: float = 1e-3,
    beta: float = 0.9,
    local: Work = "plain",
    mu: float | None = None,
    evaluate: Shown = "last_two",
    compression: Compression | None = None,
) -> LocalMethod | Compressed:
    """rule: the local optimiser; beta: momentum; local, mu, evaluate, compression: see `adapted`."""
    return adapted(ExtrapolatedMomentum(epsilon, beta), rule, local, mu, evaluate, compression)

"""FedExP: the server extrapolates as far as the clients disagree.

Jhunjhunwala, Wang, Joshi, ICLR 2023, arXiv:2301.09604, Algorithm 1.

    A <- mean |y_K - x|^2,  delta <- mean(y_K - x)
    x <- x + max(1, A / (2 (|delta|^2 + epsilon))) delta

and FedExP-M, with momentum, in the form that the authors' code and Takakura et al. 2025 agree on:

    v <- beta v + delta;  R <- A + (beta / 2) R
    x <- x + R / (2 (|v|^2 + epsilon)) v

Norms over the whole model. Uncertain points. Takakura et al. write FedExP without max(1, .): floor = false. The code of
the authors has epsilon * S where the paper has epsilon (give the product), and decays it by the square of the step
size's decay (give a schedule). Its branch for momentum is never reached; FedExP-M here has it in both lines. Evaluated
at the mean of the last two iterates. Means have the federation's client weights, A as well as delta, so that A >=
|delta|^2 (Jensen); under a compression both are of the messages as they were decoded.

Departures:
- There is no step where |delta|^2 + epsilon = 0.
- FedExP-M has no max(1, .), as in the authors' recursion.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .contract import Round
from .local import LocalMethod, Rule, ServerRule
from .parts.adapted import Shown, Work, adapted
from .parts.compression import Compressed, Compression
from .parts.rules import Sgd, fraction, nonnegative
from .tree import Tree


def ratio(a: Tensor, b: Tensor) -> Tensor:
    """a / b, b >= 0; 0 where b = 0."""
    return torch.where(b > 0, a / b, 0.0)


@dataclass(frozen=True)
class Extrapolated(ServerRule):
    epsilon: float = 1e-3
    floor: bool = True

    measures = True

    def __post_init__(self) -> None:
        nonnegative(epsilon=self.epsilon)

    def step(self, x: Tree, delta: Tree, norm2: Tensor, state: Any, round: Round) -> tuple[Tree, Any]:
        return x + delta * self.rate(x, delta, norm2, state, round), state

    def rate(self, x: Tree, delta: Tree, norm2: Tensor, state: Any, round: Round) -> Tensor:
        lr = ratio(norm2, 2 * (delta.norm2() + self.epsilon))
        return lr.clamp(min=1.0) if self.floor else lr


class Extrapolation(NamedTuple):
    v: Tree
    r: Tensor  # ()


@dataclass(frozen=True)
class ExtrapolatedMomentum(ServerRule):
    """State: v and R."""

    epsilon: float = 1e-3
    beta: float = 0.9

    measures = True

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

"""FedDuAdam: the server adapts its metric as Adam does, and the length of its step as FedExP does.

Takakura, Liew, Hasegawa 2025, arXiv:2505.11126, Algorithm 1.

Choose it where you would choose FedAdam and do not want to tune the server's step size: it follows from the
displacements of the clients, as in FedExP-M. Each client sends one number more.

    A <- mean |y_K - x|^2,  delta <- mean(y_K - x)
    s <- beta2 s + (1 - beta2) delta^2,  G <- sqrt(s) + epsilon
    v <- beta1 v + (1 - beta1) delta
    m <- (beta1 / 2) m + ((1 - beta1) / 2) A
    x <- x + m / (sum v^2 / G + epsilon_g) v / G

All start at 0. The weight of the old m is beta1 / 2, not beta1, which the paper's strong projection condition asks for.
There is no bias correction: with epsilon = 0 it would cancel. With G = 1 this is FedExP-M. epsilon_g has the unit of
|delta|; the paper tunes it and says that 0, our default, works; it may be a schedule. The model is evaluated at the
mean of the last two iterates. The means have the federation's client weights, A as well as delta; under a compression
both are of the messages as they were decoded.

Departures:
- 0 / 0 = 0, and there is no step where sum v^2 / G = 0.
- The general mirror map is not here; the paper, too, uses the quadratic one alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .local import LocalMethod, Rule
from .parts.adapted import Shown, Work, adapted
from .parts.checks import fraction
from .parts.compression import Compressed, Compression
from .parts.doubly_adaptive import Averages, DoublyAdaptive
from .parts.rules import Sgd
from .tree import Tree


@dataclass(frozen=True)
class DoublyAdaptiveAdam(DoublyAdaptive):
    """Moving averages with weights `betas` of the old values. State: s, v and m."""

    betas: tuple[float, float] = (0.9, 0.99)

    def __post_init__(self) -> None:
        super().__post_init__()
        fraction(beta1=self.betas[0], beta2=self.betas[1])

    def init(self, x: Tree) -> Averages:
        return Averages(x.zeros(), x.zeros(), x.flat.new_zeros(()))

    def averages(self, delta: Tree, norm2: Tensor, state: Averages) -> Averages:
        b1, b2 = self.betas
        s, v = state.s.lerp(delta * delta, 1 - b2), state.v.lerp(delta, 1 - b1)
        return Averages(s, v, b1 / 2 * state.m + (1 - b1) / 2 * norm2)

    def kept(self, averages: Averages) -> Averages:
        return averages


def feddu_adam(
    rule: Rule = Sgd(0.1),
    betas: tuple[float, float] = (0.9, 0.99),
    epsilon: float = 1e-9,
    epsilon_g: float = 0.0,
    local: Work = "plain",
    mu: float | None = None,
    evaluate: Shown = "last_two",
    compression: Compression | None = None,
) -> LocalMethod | Compressed:
    """rule: the local optimiser; epsilon: in G; epsilon_g: in the step; local, mu, evaluate, compression: see
    `adapted`."""
    return adapted(DoublyAdaptiveAdam(epsilon, epsilon_g, betas), rule, local, mu, evaluate, compression)

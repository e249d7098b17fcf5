"""FedDuAdagrad: the server adapts its metric as Adagrad does, and the length of its step as FedExP does.

Takakura, Liew, Hasegawa 2025, arXiv:2505.11126, Algorithm 1.

Choose it where you would choose FedAdagrad and do not want to tune the server's step size: it follows from the
displacements of the clients, as in FedExP. Each client sends one number more.

    A <- mean |y_K - x|^2,  delta <- mean(y_K - x)
    s <- s + delta^2,  G <- sqrt(s) + epsilon
    x <- x + (A / 2) / (sum delta^2 / G + epsilon_g) delta / G

s starts at 0. With G = 1 this is FedExP without its floor. epsilon_g has the unit of |delta|; the paper tunes it and
says that 0, our default, works; it may be a schedule. The model is evaluated at the mean of the last two iterates. The
means have the federation's client weights, A as well as delta; under a compression both are of the messages as they
were decoded.

Departures:
- 0 / 0 = 0, and there is no step where sum v^2 / G = 0.
- The general mirror map is not here; the paper, too, uses the quadratic one alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .local import LocalMethod, Rule
from .parts.adapted import Shown, Work, adapted
from .parts.compression import Compressed, Compression
from .parts.doubly_adaptive import Averages, DoublyAdaptive
from .parts.rules import Sgd
from .tree import Tree


@dataclass(frozen=True)
class DoublyAdaptiveAdagrad(DoublyAdaptive):
    """s <- s + delta^2, v = delta, m = A / 2. State: s."""

    def init(self, x: Tree) -> Tree:
        return x.zeros()

    def averages(self, delta: Tree, norm2: Tensor, state: Tree) -> Averages:
        return Averages(state + delta * delta, delta, norm2 / 2)

    def kept(self, averages: Averages) -> Tree:
        return averages.s


def feddu_adagrad(
    rule: Rule = Sgd(0.1),
    epsilon: float = 1e-9,
    epsilon_g: float = 0.0,
    local: Work = "plain",
    mu: float | None = None,
    evaluate: Shown = "last_two",
    compression: Compression | None = None,
) -> LocalMethod | Compressed:
    """rule: the local optimiser; epsilon: in G; epsilon_g: in the step; local, mu, evaluate, compression: see
    `adapted`."""
    return adapted(DoublyAdaptiveAdagrad(epsilon, epsilon_g), rule, local, mu, evaluate, compression)

"""FedDuA: an adaptive metric and an adaptive step, both on the server. FedDuAdagrad, FedDuAdam.

Takakura, Liew, Hasegawa 2025, arXiv:2505.11126, Algorithm 1.

    A <- mean |y_K - x|^2,  delta <- mean(y_K - x)
    adagrad   s <- s + delta^2                          v <- delta                          m <- A / 2
    adam      s <- beta2 s + (1 - beta2) delta^2        v <- beta1 v + (1 - beta1) delta
              m <- (beta1 / 2) m + ((1 - beta1) / 2) A
    G <- sqrt(s) + epsilon;  x <- x + m / (sum v^2 / G + epsilon_g) v / G

beta1 / 2 on the old m is meant (strong projection condition). No bias correction: with epsilon = 0 it would cancel. All
start at 0. With G = 1 these are FedExP without its floor, and FedExP-M. Evaluated at the mean of the last two iterates.
epsilon_g has the unit of |delta|; the paper tunes it and says that 0, our default, works; it may be a schedule. Means
have the federation's client weights, A as well as delta; under a compression both are of the messages as they were
decoded.

Departures:
- 0 / 0 = 0, and there is no step where sum v^2 / G = 0.
- The general mirror map is not here; the paper, too, uses the quadratic one alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from .contract import Round
from .fedexp import ratio
from .fedopt import quotient
from .local import LocalMethod, Rule, ServerRule
from .parts.adapted import Shown, Work, adapted
from .parts.compression import Compressed, Compression
from .parts.rules import Sgd, fraction, nonnegative
from .tree import Tree


class DuAdam(NamedTuple):
    s: Tree
    v: Tree
    m: Tensor  # ()


@dataclass(frozen=True)
class DoublyAdaptive(ServerRule):
    """FedDuAdagrad's. State: s."""

    epsilon: float = 1e-9
    epsilon_g: float = 0.0

    measures = True

    def __post_init__(self) -> None:
        nonnegative(epsilon=self.epsilon, epsilon_g=self.epsilon_g)

    def metric(self, s: Tree) -> Tree:
        """G, the diagonal."""
        return Tree(s.flat.sqrt() + self.epsilon, s.layout)

    def preconditioned(self, s: Tree, v: Tree, m: Tensor) -> tuple[Tree, Tensor]:
        """(v / G, eta_g)."""
        scaled = quotient(v, self.metric(s))
        below = v.dot(scaled)
        return scaled, ratio(m * (below > 0), below + self.epsilon_g)

    def moments(self, delta: Tree, norm2: Tensor, state: Any) -> DuAdam:
        """The next s, and the v and m that the step is taken with."""
        return DuAdam(state + delta * delta, delta, norm2 / 2)

    def init(self, x: Tree) -> Any:
        return x.zeros()

    def kept(self, moments: DuAdam) -> Any:
        """The next state."""
        return moments.s

    def step(self, x: Tree, delta: Tree, norm2: Tensor, state: Any, round: Round) -> tuple[Tree, Any]:
        moments = self.moments(delta, norm2, state)
        scaled, rate = self.preconditioned(*moments)
        return x + scaled * rate, self.kept(moments)

    def rate(self, x: Tree, delta: Tree, norm2: Tensor, state: Any, round: Round) -> Tensor:
        return self.preconditioned(*self.moments(delta, norm2, state))[1]


@dataclass(frozen=True)
class DoublyAdaptiveMomentum(DoublyAdaptive):
    """FedDuAdam's. State: s, v and m."""

    betas: tuple[float, float] = (0.9, 0.99)

    def __post_init__(self) -> None:
        super().__post_init__()
        fraction(beta1=self.betas[0], beta2=self.betas[1])

    def init(self, x: Tree) -> DuAdam:
        return DuAdam(x.zeros(), x.zeros(), x.flat.new_zeros(()))

    def moments(self, delta: Tree, norm2: Tensor, state: DuAdam) -> DuAdam:
        b1, b2 = self.betas
        s, v = state.s.lerp(delta * delta, 1 - b2), state.v.lerp(delta, 1 - b1)
        return DuAdam(s, v, b1 / 2 * state.m + (1 - b1) / 2 * norm2)

    def kept(self, moments: DuAdam) -> DuAdam:
        return moments


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
    return adapted(DoublyAdaptive(epsilon, epsilon_g), rule, local, mu, evaluate, compression)


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
    return adapted(DoublyAdaptiveMomentum(epsilon, epsilon_g, betas), rule, local, mu, evaluate, compression)

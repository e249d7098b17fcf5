"""FedAvg-M: local steps along a mixture of the gradient and a momentum that all clients share.

Cheng, Huang, Wu, Yuan, ICLR 2024, arXiv:2306.16504. FedCM, Xu et al. 2021, arXiv:2106.10874, with a normalised
pseudo-gradient.

Choose it when clients differ and can keep no state: a momentum over rounds damps the drift. Clients send as much as in
FedAvg and receive twice as much; the paper's theory is for full participation.

    y <- y - lr u,  u = beta g(y) + (1 - beta) G          K times; G does not change during the round
    G <- mean over clients and steps of u,  (x - y_K) / (lr K) per client
    x <- x - gamma G

beta is the weight of the new gradient; beta = 1 is FedAvg. gamma = server_lr * lr * K unless given. The machinery is in
`parts/shared_momentum.py`.

Uncertain, as the rules were not read in the paper's PDF: start = "gradient" (one pass over all clients, G is the mean
gradient at x0) is what the theory of the VR methods uses, from memory; "zeros" is the default.

Departures:
- With a rule other than `sgd` the displacement is no multiple of the mean of u, so that every client sends that mean
  too, one vector more.
- The paper analyses the method for full participation; here it runs with a cohort as well.
- Means are uniform, whatever the federation's client weights are.
- start = "gradient" takes the gradients over all rows of the clients, where the theory has one large batch of unknown
  size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .contract import Oracle
from .local import Rule
from .parts.rules import Sgd
from .parts.shared_momentum import Broadcast, Direction, SharedMomentum, shared_momentum
from .parts.warm_start import Start
from .tree import Tree


@dataclass(frozen=True)
class MixedDirection(Direction):
    """u = beta g + (1 - beta) G."""

    def at(self, y: Tree, public: Broadcast, own: Any, oracle: Oracle) -> tuple[Tree, Tree]:
        g = oracle(y)
        return public.along.lerp(g, self.beta), g


def fedavg_m(
    rule: Rule = Sgd(0.1),
    beta: float = 0.1,
    gamma: float | None = None,
    server_lr: float | None = None,
    start: Start = "zeros",
) -> SharedMomentum:
    """rule: the rule of the local steps along u, plain steps unless given; beta: weight of the new gradient, 1 is
    FedAvg; gamma: the server's step size along G, server_lr * lr * K unless given; server_lr: multiple of the mean
    displacement that the server applies, 1 unless given, and refused with gamma; start: G = 0 (zeros), or one pass over
    all clients for G = the mean gradient at x0 (gradient)."""
    return shared_momentum(MixedDirection(beta), rule, gamma, server_lr, start)

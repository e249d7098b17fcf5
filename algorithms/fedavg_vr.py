"""FedAvg-VR: FedAvg-M whose direction is corrected by a gradient at the previous model, as in STORM.

Cheng, Huang, Wu, Yuan, ICLR 2024, arXiv:2306.16504, where it is called FedAvg-M-VR.

Choose it when the noise of the batches limits FedAvg-M, and two gradients per step and the download of one more vector
of the model's size can be afforded. It does not reduce the drift of FedAvg: without noise, on quadratic losses, both
come to rest at the same point.

    y <- y - lr u,  u = g(y) + (1 - beta) (G - g(x_prev))          K times; both gradients on the same batch
    G <- mean over clients and steps of u,  (x - y_K) / (lr K) per client
    x <- x - gamma G;  x_prev <- the x before

beta is the weight of the new gradient; beta = 1 is FedAvg. gamma = server_lr * lr * K unless given. The machinery is in
`parts/shared_momentum.py`.

Uncertain, as the rules were not read in the paper's PDF: start = "gradient" (one pass over all clients, G is the mean
gradient at x0) is what the theory uses, from memory; "zeros" is the default.

Departures:
- x_prev is sent and not rebuilt as x + gamma G, which would be exact up to rounding only.
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
class ReducedDirection(Direction):
    """u = g + (1 - beta) (G - g'), g' the gradient at x_prev on the same batch."""

    reduced = True

    def at(self, y: Tree, public: Broadcast, own: Any, oracle: Oracle) -> tuple[Tree, Tree]:
        g = oracle(y)
        return g.add(public.along - oracle(public.previous), 1 - self.beta), g


def fedavg_vr(
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
    return shared_momentum(ReducedDirection(beta), rule, gamma, server_lr, start)

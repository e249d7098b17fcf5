"""MoFedSAM: FedSAM's gradients in a mixture with a momentum that all clients share.

Qu, Li, Duan, Liu, Tang, Lu, ICML 2022, arXiv:2206.02618.

Choose it where you would choose FedSAM and clients differ: the local steps also follow a momentum that all clients
share, which damps their drift. Clients send as much as in FedSAM and receive twice as much.

    e = rho g(y) / |g(y)|,  u = beta g(y + e) + (1 - beta) G,  y <- y - lr u          K times
    x <- x + server_lr * mean of (y_K - x)
    G <- mean over the cohort and the steps of u,  (x - y_K) / (lr K) per client

beta is the weight of the new gradient; both gradients of a step are on the same batch, and G does not change during the
round. rho = 0 is FedCM at twice its gradients, beta = 1 is FedSAM. The machinery is in `parts/shared_momentum.py`.

Departures:
- With a rule other than `sgd` the displacement is no multiple of the mean of u, so that every client sends that mean
  too, one vector more.
- With unequal numbers of local steps each displacement is divided by its own number and their mean is multiplied by the
  mean number, so that G remains the mean of u.
- Means are uniform, whatever the federation's client weights are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .contract import Oracle
from .fedavg_m import MixedDirection
from .local import Rule
from .parts.rules import Sgd
from .parts.shared_momentum import Broadcast, SharedMomentum, shared_momentum
from .parts.sharpness import Sharpness
from .tree import Tree


@dataclass(frozen=True)
class SharpDirection(MixedDirection):
    """u = beta g(y + e) + (1 - beta) G."""

    sharpness: Sharpness = Sharpness()

    def at(self, y: Tree, public: Broadcast, own: Any, oracle: Oracle) -> tuple[Tree, Tree]:
        return super().at(y, public, own, self.sharpness.around(oracle))


def mofedsam(rule: Rule = Sgd(0.1), beta: float = 0.1, rho: float = 0.05, server_lr: float = 1.0) -> SharedMomentum:
    """rule: the rule of the local steps along u, plain steps unless given; beta: weight of the new gradient, 1 is
    FedSAM; rho: how far away the worst point nearby is; server_lr: multiple of the mean displacement that the server
    applies."""
    return shared_momentum(SharpDirection(beta, Sharpness(rho)), rule, None, server_lr, "zeros")

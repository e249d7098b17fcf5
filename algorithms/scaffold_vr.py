"""SCAFFOLD-VR: SCAFFOLD-M whose direction is corrected by a gradient at the previous model, as in STORM.

Cheng, Huang, Wu, Yuan, ICLR 2024, arXiv:2306.16504, where it is called SCAFFOLD-M-VR.

Choose it when the noise of the batches limits SCAFFOLD-M, and two gradients per step and the download of one more
vector of the model's size can be afforded.

    y   <- y - lr u,  u = g(y) - beta (c_i - c) + (1 - beta) (G - g(x_prev))          K times; one batch for both
    c_i <- mean of the K gradients g(y)
    G   <- mean over clients and steps of u,  (x - y_K) / (lr K) per client
    x   <- x - gamma G;  x_prev <- the x before
    c   <- c + |S|/N mean(change of c_i)

beta is the weight of the new gradient; beta = 1 is SCAFFOLD. gamma = server_lr * lr * K unless given. The machinery is
in `parts/shared_momentum.py`.

Uncertain, as the rules were not read in the paper's PDF: start = "gradient" (one pass over all clients: c_i is the
client's own gradient at x0, G and c are their mean) is what the theory uses, from memory; "zeros" is the default.

Departures:
- x_prev is sent and not rebuilt as x + gamma G, which would be exact up to rounding only.
- Of G and c the server sends down beta c + (1 - beta) G alone, since a step needs nothing else of the two.
- With a rule other than `sgd` the displacement is no multiple of the mean of u, so that every client sends that mean
  too, one vector more.
- Means are uniform, whatever the federation's client weights are.
- start = "gradient" takes the gradients over all rows of the clients, where the theory has one large batch of unknown
  size.
"""

from __future__ import annotations

from dataclasses import dataclass

from .contract import Oracle
from .local import Rule
from .parts.rules import Sgd
from .parts.shared_momentum import Broadcast, Direction, SharedMomentum, shared_momentum
from .parts.warm_start import Start
from .tree import Tree


@dataclass(frozen=True)
class ControlledReducedDirection(Direction):
    """u = g - beta c_i - (1 - beta) g' + public.along, where public.along is beta c + (1 - beta) G and g' is the
    gradient at x_prev on the same batch."""

    controlled = True
    reduced = True

    def at(self, y: Tree, public: Broadcast, own: Tree, oracle: Oracle) -> tuple[Tree, Tree]:
        g = oracle(y)
        return g.add(own, -self.beta).add(oracle(public.previous), self.beta - 1) + public.along, g


def scaffold_vr(
    rule: Rule = Sgd(0.1),
    beta: float = 0.1,
    gamma: float | None = None,
    server_lr: float | None = None,
    start: Start = "zeros",
) -> SharedMomentum:
    """rule: the rule of the local steps along u, plain steps unless given; beta: weight of the new gradient, 1 is
    SCAFFOLD; gamma: the server's step size along G, server_lr * lr * K unless given; server_lr: multiple of the mean
    displacement that the server applies, 1 unless given, and refused with gamma; start: G = c = c_i = 0 (zeros), or one
    pass over all clients for c_i = gradient at x0 and G = c = their mean (gradient)."""
    return shared_momentum(ControlledReducedDirection(beta), rule, gamma, server_lr, start)

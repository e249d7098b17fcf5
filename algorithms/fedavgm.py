"""FedAvgM: FedAvg with heavy-ball momentum on the server.

Hsu, Qi, Brown 2019, arXiv:1909.06335.

Choose it as a first step beyond FedAvg: nothing changes on the clients, and no traffic is added. With `beta` = 0.9,
steps in one direction add up to ten times `server_lr`, so tune both together.

    delta <- mean(y_K - x)
    v <- beta v + delta                  no dampening, as in the paper, FedExP's code and Flower
    x <- x + server_lr v                 Nesterov: x + server_lr (delta + beta v), with the new v

beta = 0 is FedAvg with a server step size. This is not FedAvg-M (Cheng et al. 2024), whose momentum is in the local
steps. Nesterov is `torch.optim.SGD(nesterov=True)` on the pseudo-gradient, as in DiLoCo.

Departures:
- Nesterov's form, `evaluate: last_two` and local training other than FedAvg's are options that the paper does not have.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .contract import Round
from .local import LocalMethod, Rule, ServerRule
from .parts.adapted import Shown, Work, adapted
from .parts.checks import fraction, positive
from .parts.compression import Compressed, Compression
from .parts.rules import Sgd
from .tree import Tree


@dataclass(frozen=True)
class ServerMomentum(ServerRule):
    """Heavy-ball momentum on the mean displacement. State: v, shaped like x."""

    lr: float = 1.0
    beta: float = 0.9
    nesterov: bool = False

    def __post_init__(self) -> None:
        positive(server_lr=self.lr)
        fraction(beta=self.beta)

    def init(self, x: Tree) -> Tree:
        return x.zeros()

    def step(self, x: Tree, delta: Tree, norm2: Tensor, state: Tree, round: Round) -> tuple[Tree, Tree]:
        v = delta.add(state, self.beta)
        return x.add(delta.add(v, self.beta) if self.nesterov else v, self.lr), v

    def rate(self, x: Tree, delta: Tree, norm2: Tensor, state: Tree, round: Round) -> float:
        return self.lr


def fedavgm(
    rule: Rule = Sgd(0.1),
    server_lr: float = 1.0,
    beta: float = 0.9,
    nesterov: bool = False,
    local: Work = "plain",
    mu: float | None = None,
    evaluate: Shown = "last",
    compression: Compression | None = None,
) -> LocalMethod | Compressed:
    """rule: the local optimiser; beta: weight of the old v; local, mu, evaluate, compression: see `adapted`."""
    return adapted(ServerMomentum(server_lr, beta, nesterov), rule, local, mu, evaluate, compression)

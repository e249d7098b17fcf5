"""FedYogi: Yogi on the server, along the mean displacement.

Reddi et al., ICLR 2021, arXiv:2003.00295, Algorithm 2.

Choose it when FedAdam is unstable: after a large displacement the second moment shrinks only slowly, so that step sizes
do not grow suddenly. Clients and traffic are those of FedAvg.

    delta <- mean(y_K - x)
    m <- beta1 m + (1 - beta1) delta
    v <- v - (1 - beta2) delta^2 sign(v - delta^2)
    x <- x + server_lr m / (sqrt(v) + tau)

Uncertain: v starts at tau^2 as in the algorithm; v_init = 0 is what the official code, Flower and Takakura et al. 2025
do. There is no bias correction, as in the algorithm; `parts/adaptive_server.py` says which programs have one. Takakura
et al. use tau = 1e-9.

Departures:
- 0 / 0 = 0, for tau = 0.
- The mean of the displacements has the federation's client weights, uniform unless it says otherwise; the algorithm's
  are uniform, and its experiments weigh by examples.
- v_init and bias_correction are options for what other programs do.
"""

from __future__ import annotations

from .local import LocalMethod, Rule
from .parts.adapted import Shown, Work, adapted
from .parts.adaptive_server import AdaptiveServer
from .parts.compression import Compressed, Compression
from .parts.rules import Sgd
from .tree import Tree


class Yogi(AdaptiveServer):
    """v <- v - (1 - beta2) delta^2 sign(v - delta^2)."""

    def second(self, v: Tree, square: Tree) -> Tree:
        return v.add(square * (v - square).sign(), self.betas[1] - 1)


def fedyogi(
    rule: Rule = Sgd(0.1),
    server_lr: float = 0.01,
    betas: tuple[float, float] = (0.9, 0.99),
    tau: float = 1e-3,
    v_init: float | None = None,
    bias_correction: bool = False,
    local: Work = "plain",
    mu: float | None = None,
    evaluate: Shown = "last",
    compression: Compression | None = None,
) -> LocalMethod | Compressed:
    """rule: the local optimiser; v_init: the first v, tau^2 unless given; local, mu, evaluate, compression: see
    `adapted`."""
    server = Yogi(server_lr, betas, tau, v_init, bias_correction)
    return adapted(server, rule, local, mu, evaluate, compression)

"""FedAdagrad: Adagrad on the server, along the mean displacement.

Reddi et al., ICLR 2021, arXiv:2003.00295, Algorithm 2.

Choose it when gradients differ much in size between coordinates, as with rare words in texts. The step size of a
coordinate only shrinks; clients and traffic are those of FedAvg.

    delta <- mean(y_K - x)
    v <- v + delta^2
    x <- x + server_lr delta / (sqrt(v) + tau)

Uncertain: v starts at tau^2 as in the algorithm; v_init = 0 is what the official code, Flower and Takakura et al. 2025
do. Takakura et al. use tau = 1e-9.

Departures:
- 0 / 0 = 0, for tau = 0.
- The mean of the displacements has the federation's client weights, uniform unless it says otherwise; the algorithm's
  are uniform, and its experiments weigh by examples.
- v_init is an option for what other programs do.
"""

from __future__ import annotations

from .local import LocalMethod, Rule
from .parts.adapted import Shown, Work, adapted
from .parts.adaptive_server import AdaptiveServer
from .parts.compression import Compressed, Compression
from .parts.rules import Sgd
from .tree import Tree


class Adagrad(AdaptiveServer):
    """v <- v + delta^2."""

    def second(self, v: Tree, square: Tree) -> Tree:
        return v + square


def fedadagrad(
    rule: Rule = Sgd(0.1),
    server_lr: float = 0.1,
    tau: float = 1e-3,
    v_init: float | None = None,
    local: Work = "plain",
    mu: float | None = None,
    evaluate: Shown = "last",
    compression: Compression | None = None,
) -> LocalMethod | Compressed:
    """rule: the local optimiser; v_init: the first v, tau^2 unless given; local, mu, evaluate, compression: see
    `adapted`."""
    server = Adagrad(server_lr, (0.0, 0.0), tau, v_init)
    return adapted(server, rule, local, mu, evaluate, compression)

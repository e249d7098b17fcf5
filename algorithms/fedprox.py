"""FedProx: local steps on a loss with a proximal term, which pulls back to the server's model.

Li et al., MLSys 2020, arXiv:1812.06127, Algorithm 2.

Choose it when many local steps lead clients far away from the server's model and clients can keep no state. The pull
bounds the drift; it does not remove it.

    y <- y - step(g(y) + mu (y - x))      the gradient of f_i(y) + mu |y - x|^2 / 2, K times
    x <- x + server_lr * mean of (y_K - x)

Departures:
- The paper asks for an inexact minimiser of the local problem and leaves the solver open; here it is K steps of any
  rule.
- The paper samples clients by size and averages uniformly; here sampling and weights are the federation's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .contract import Oracle
from .local import Carry, Estimator, LocalMethod, Rule, check_carry
from .parts.checks import nonnegative
from .parts.compression import Compressed, Compression, compressed
from .parts.rules import Sgd
from .parts.servers import Mean, Over
from .tree import Tree


@dataclass(frozen=True)
class Prox(Estimator):
    """The direction is g(y) + mu (y - x). Trace: x, the model at the beginning of the round."""

    mu: float = 0.1

    def __post_init__(self) -> None:
        nonnegative(mu=self.mu)

    def begin(self, x: Tree, c: Any, c_i: Any) -> Tree:
        return x

    def estimate(self, oracle: Oracle, y: Tree, c: Any, c_i: Any, trace: Tree) -> tuple[Tree, Tree]:
        return oracle(y).add(y - trace, self.mu), trace


def fedprox(
    mu: float = 0.1,
    rule: Rule = Sgd(0.1),
    server_lr: float = 1.0,
    over: Over = "cohort",
    carry: Carry = "reset",
    compression: Compression | None = None,
) -> LocalMethod | Compressed:
    """mu: weight of the pull towards the server's model; rule: the local optimiser; server_lr: step size along the mean
    displacement; over: see `fedavg`; carry: see `fedavg`; compression: see `fedavg`."""
    check_carry(rule, carry)
    return compressed(LocalMethod(rule, Prox(mu), Mean(server_lr, over), carry), compression)

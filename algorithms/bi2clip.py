"""Bi2Clip: BiClip on the steps of the clients and on the step of the server.

Lee, Zaheer, Li, ICML 2025 ("Efficient distributed optimization under heavy-tailed noise", TailOPT), arXiv:2502.04164.

Choose it when gradients have heavy tails, and neither the clients nor the server can keep moments: thresholds on the
server's step take the place of an adaptive server. There are two pairs of thresholds to tune.

    y <- (1 - lr decay) (y - lr BiClip(g(y); d, u))          K times;  delta <- mean(y_K - x)
    x <- x + server_lr BiClip(delta; server_d, server_u)

BiClip keeps magnitudes between d and u, see `parts/biclip.py`. Uncertain: the outer thresholds, 0 and 0.01, are ours as
the inner ones are. The rule is BiClip; any other rule may stand in its place.

Departures:
- The inner thresholds d = 0 and u = 0.1 and mode = "coordinate" are defaults of ours; the paper tunes thresholds by
  task.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .contract import Round
from .fedavg import Plain
from .local import LocalMethod, Rule, ServerRule
from .parts.biclip import BiClip, Mode, Threshold, biclip, check_thresholds
from .parts.checks import positive
from .tree import Tree


@dataclass(frozen=True)
class BiClipServer(ServerRule):
    lr: float = 1.0
    d: float = 0.0
    u: Threshold = 0.01
    mode: Mode = "coordinate"

    def __post_init__(self) -> None:
        positive(server_lr=self.lr)
        check_thresholds(self.d, self.u, self.mode, "server_")

    def step(self, x: Tree, delta: Tree, norm2: Tensor, state: Any, round: Round) -> tuple[Tree, Any]:
        return x.add(biclip(delta, self.d, self.u, self.mode), self.lr), state

    def rate(self, x: Tree, delta: Tree, norm2: Tensor, state: Any, round: Round) -> float:
        return self.lr


def bi2clip(
    rule: Rule = BiClip(),
    server_lr: float = 1.0,
    server_d: float = 0.0,
    server_u: Threshold = 0.01,
    server_mode: Mode = "coordinate",
) -> LocalMethod:
    """rule: the local optimiser, BiClip with its thresholds; server_d, server_u, server_mode: those of the outer
    BiClip."""
    return LocalMethod(rule, Plain(), BiClipServer(server_lr, server_d, server_u, server_mode))

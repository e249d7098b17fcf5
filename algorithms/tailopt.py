"""TailOPT: BiClip steps on the clients, and an outer optimiser. Avg-, Adagrad-, RMSProp-, Adam-BiClip and Bi2Clip.

Lee, Zaheer, Li, ICML 2025, arXiv:2502.04164.

    K times: y <- (1 - lr decay) (y - lr BiClip(g; d, u));  delta <- mean(y_K - x)
    avg_biclip       x <- x + server_lr delta
    adagrad_biclip   FedAdagrad's server, see `fedopt`
    rmsprop_biclip   v <- beta2 v + (1 - beta2) delta^2;  x <- x + server_lr delta / (sqrt(v) + tau)
    adam_biclip      FedAdam's server
    bi2clip          x <- x + server_lr BiClip(delta; server_d, server_u)

Uncertain points: the outer adaptive step's tau, first v and bias correction are taken from FedOpt (v_init: None for
tau^2; bias_correction off). bi2clip's outer thresholds, 0 and 0.01, are ours as the inner ones are. The rule is BiClip;
any other rule may stand in its place.

Departures:
- The outer adaptive steps are FedOpt's, with its tau, first v and bias correction, which the paper does not settle.
- The inner thresholds d = 0 and u = 0.1 and mode = "coordinate" are defaults of ours; the paper tunes thresholds by
  task.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .contract import Round
from .fedavg import Plain
from .fedopt import Adagrad, AdamServer
from .local import LocalMethod, Rule, ServerRule
from .parts.biclip import BiClip, Mode, Threshold, biclip, check_thresholds
from .parts.rules import positive
from .parts.servers import Mean
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


def avg_biclip(rule: Rule = BiClip(), server_lr: float = 1.0) -> LocalMethod:
    """rule: BiClip with its thresholds."""
    return LocalMethod(rule, Plain(), Mean(server_lr))


def adagrad_biclip(
    rule: Rule = BiClip(), server_lr: float = 0.1, tau: float = 1e-3, v_init: float | None = None
) -> LocalMethod:
    """rule: BiClip with its thresholds; v_init: None for tau^2."""
    return LocalMethod(rule, Plain(), Adagrad(server_lr, (0.0, 0.0), tau, v_init))


def rmsprop_biclip(
    rule: Rule = BiClip(),
    server_lr: float = 0.01,
    beta2: float = 0.99,
    tau: float = 1e-3,
    v_init: float | None = None,
) -> LocalMethod:
    """rule: BiClip with its thresholds; v_init: None for tau^2."""
    return LocalMethod(rule, Plain(), AdamServer(server_lr, (0.0, beta2), tau, v_init))


def adam_biclip(
    rule: Rule = BiClip(),
    server_lr: float = 0.01,
    betas: tuple[float, float] = (0.9, 0.99),
    tau: float = 1e-3,
    v_init: float | None = None,
    bias_correction: bool = False,
) -> LocalMethod:
    """rule: BiClip with its thresholds; v_init: None for tau^2."""
    return LocalMethod(rule, Plain(), AdamServer(server_lr, betas, tau, v_init, bias_correction))


def bi2clip(
    rule: Rule = BiClip(),
    server_lr: float = 1.0,
    server_d: float = 0.0,
    server_u: Threshold = 0.01,
    server_mode: Mode = "coordinate",
) -> LocalMethod:
    """rule: BiClip with its thresholds; server_d, server_u, server_mode: those of the outer BiClip."""
    return LocalMethod(rule, Plain(), BiClipServer(server_lr, server_d, server_u, server_mode))

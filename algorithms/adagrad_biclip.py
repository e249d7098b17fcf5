"""Adagrad-BiClip: BiClip steps on the clients, Adagrad on the server.

Lee, Zaheer, Li, ICML 2025 ("Efficient distributed optimization under heavy-tailed noise", TailOPT), arXiv:2502.04164.

Choose it when gradients have heavy tails and differ much in size between coordinates: BiClip bounds the clients' steps
without any state, and Adagrad on the server gives each coordinate a step size, which only shrinks.

    y <- (1 - lr decay) (y - lr BiClip(g(y); d, u))          K times;  delta <- mean(y_K - x)
    v <- v + delta^2
    x <- x + server_lr delta / (sqrt(v) + tau)

BiClip keeps magnitudes between d and u, see `parts/biclip.py`. The rule is BiClip; any other rule may stand in its
place. Uncertain: tau and the first v are taken from FedOpt (v_init: tau^2 unless given).

Departures:
- The outer adaptive step is FedOpt's, with its tau and first v, which the paper does not settle.
- The inner thresholds d = 0 and u = 0.1 and mode = "coordinate" are defaults of ours; the paper tunes thresholds by
  task.
"""

from __future__ import annotations

from .fedadagrad import Adagrad
from .fedavg import Plain
from .local import LocalMethod, Rule
from .parts.biclip import BiClip


def adagrad_biclip(
    rule: Rule = BiClip(), server_lr: float = 0.1, tau: float = 1e-3, v_init: float | None = None
) -> LocalMethod:
    """rule: the local optimiser, BiClip with its thresholds; v_init: the first v, tau^2 unless given."""
    return LocalMethod(rule, Plain(), Adagrad(server_lr, (0.0, 0.0), tau, v_init))

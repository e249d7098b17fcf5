"""Adam-BiClip: BiClip steps on the clients, Adam on the server.

Lee, Zaheer, Li, ICML 2025 ("Efficient distributed optimization under heavy-tailed noise", TailOPT), arXiv:2502.04164.

Choose it when gradients have heavy tails and differ much in size between coordinates: BiClip bounds the clients' steps
without any state, and Adam on the server has a momentum and gives each coordinate a step size, which may grow again.

    y <- (1 - lr decay) (y - lr BiClip(g(y); d, u))          K times;  delta <- mean(y_K - x)
    m <- beta1 m + (1 - beta1) delta
    v <- beta2 v + (1 - beta2) delta^2
    x <- x + server_lr m / (sqrt(v) + tau)

BiClip keeps magnitudes between d and u, see `parts/biclip.py`. The rule is BiClip; any other rule may stand in its
place. Uncertain: tau, the first v and the bias correction are taken from FedOpt (v_init: tau^2 unless given,
bias_correction off).

Departures:
- The outer adaptive step is FedOpt's, with its tau, first v and bias correction, which the paper does not settle.
- The inner thresholds d = 0 and u = 0.1 and mode = "coordinate" are defaults of ours; the paper tunes thresholds by
  task.
"""

from __future__ import annotations

from .fedadam import AdamServer
from .fedavg import Plain
from .local import LocalMethod, Rule
from .parts.biclip import BiClip


def adam_biclip(
    rule: Rule = BiClip(),
    server_lr: float = 0.01,
    betas: tuple[float, float] = (0.9, 0.99),
    tau: float = 1e-3,
    v_init: float | None = None,
    bias_correction: bool = False,
) -> LocalMethod:
    """rule: the local optimiser, BiClip with its thresholds; v_init: the first v, tau^2 unless given."""
    return LocalMethod(rule, Plain(), AdamServer(server_lr, betas, tau, v_init, bias_correction))

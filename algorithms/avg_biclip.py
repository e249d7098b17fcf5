"""Avg-BiClip: BiClip steps on the clients, then the mean.

Lee, Zaheer, Li, ICML 2025 ("Efficient distributed optimization under heavy-tailed noise", TailOPT), arXiv:2502.04164.

Choose it when gradients have heavy tails, as those of language models, and Adam's moments do not fit into the memory of
the clients. The magnitude of every coordinate is kept between two thresholds, `d` and `u` of the rule, which must be
tuned.

    y <- (1 - lr decay) (y - lr BiClip(g(y); d, u))          K times;  delta <- mean(y_K - x)
    x <- x + server_lr delta

BiClip keeps magnitudes between d and u, see `parts/biclip.py`. The rule is BiClip; any other rule may stand in its
place.

Departures:
- The inner thresholds d = 0 and u = 0.1 and mode = "coordinate" are defaults of ours; the paper tunes thresholds by
  task.
"""

from __future__ import annotations

from .fedavg import Plain
from .local import LocalMethod, Rule
from .parts.biclip import BiClip
from .parts.servers import Mean


def avg_biclip(rule: Rule = BiClip(), server_lr: float = 1.0) -> LocalMethod:
    """rule: the local optimiser, BiClip with its thresholds; server_lr: step size along the mean displacement."""
    return LocalMethod(rule, Plain(), Mean(server_lr))

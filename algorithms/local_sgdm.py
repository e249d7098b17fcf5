"""LocalSGDM: momentum SGD on every client; the server averages models and momenta.

Yu, Jin, Yang, ICML 2019 ("PR-SGD-Momentum"), arXiv:1905.03817, Algorithm 1.

Choose it when local steps need a momentum that lasts longer than a round and clients can keep no state. Momenta are
sent and averaged as models are, which doubles the traffic; in its paper all clients take part.

    u_i <- u, y <- x;  K times: u_i <- mu u_i + g(y), y <- y - lr u_i          Nesterov: y - lr (g + mu u_i)
    x   <- x + server_lr * mean of (y_K - x)
    u   <- mean of u_i

This is FedAvg with the rule `momentum` and carry = "average". server_lr = 1 is the paper's.

Departures:
- The paper's clients keep x_i and u_i, which are the same for all after averaging; here both are sent down, so that
  clients need no state.
- All clients take part in the paper; here the mean over the cohort stands for the mean over all.
"""

from __future__ import annotations

from .fedavg import Plain
from .local import LocalMethod
from .parts.rules import Momentum
from .parts.servers import Mean


def local_sgdm(lr: float = 0.1, mu: float = 0.9, nesterov: bool = False, server_lr: float = 1.0) -> LocalMethod:
    """lr: local step size; mu: weight of the old momentum, sum form u <- mu u + g; nesterov: step along g + mu u;
    server_lr: step size along the mean displacement, not applied to the momentum."""
    return LocalMethod(Momentum(lr, mu, nesterov), Plain(), Mean(server_lr), "average")

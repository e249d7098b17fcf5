"""FedCM: local steps along a mixture of the gradient and the cohort's last mean gradient.

Xu, Wang, Wang, Yao 2021, arXiv:2106.10874.

Choose it when clients differ and can keep no state, and a small part of them takes part in each round, for which it was
made. By default it computes what FedAvg-M computes by default; that method also has the arguments `gamma` and `start`.

    y <- y - lr u,  u = beta g(y) + (1 - beta) G          K times; G does not change during the round
    x <- x + server_lr * mean of (y_K - x)
    G <- mean over the cohort and the steps of u,  (x - y_K) / (lr K) per client

beta is the weight of the new gradient, which the paper calls alpha; beta = 1 is FedAvg. This is `fedavg_m` whose server
takes the clients' mean model. The machinery is in `parts/shared_momentum.py`.

Uncertain: the server's step size. The paper has a step of its own along G, which is `fedavg_m` with gamma; its released
code takes the mean model, as far as we know, and so does the default here. The code also has a weight decay of 0.001.

Departures:
- With a rule other than `sgd` the displacement is no multiple of the mean of u, so that every client sends that mean
  too, one vector more.
- With unequal numbers of local steps each displacement is divided by its own number and their mean is multiplied by the
  mean number, so that G remains the mean of u.
- Means are uniform, whatever the federation's client weights are.
"""

from __future__ import annotations

from .fedavg_m import MixedDirection
from .local import Rule
from .parts.rules import Sgd
from .parts.shared_momentum import SharedMomentum, shared_momentum


def fedcm(rule: Rule = Sgd(0.1), beta: float = 0.1, server_lr: float = 1.0) -> SharedMomentum:
    """rule: the rule of the local steps along u, plain steps unless given; beta: weight of the new gradient, 1 is
    FedAvg; server_lr: multiple of the mean displacement that the server applies."""
    return shared_momentum(MixedDirection(beta), rule, None, server_lr, "zeros")

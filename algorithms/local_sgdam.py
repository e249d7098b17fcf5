"""LocalSGDAM: local descent-ascent along averaged momenta; iterates and momenta are averaged.

Sharma, Panda, Joshi, Varshney, ICML 2022 ("Federated Minimax Optimization"), arXiv:2203.04850, its Momentum Local SGDA.

Choose it for min-max problems with noisy batches: it is LocalSGDA with momenta, which are averaged as models are, at
twice the traffic. Clients keep no state; in the paper all of them take part.

    K times: x_i <- x_i - lr d_x,i,  y_i <- y_i + lr d_y,i;  d_i <- (1 - beta) d_i + beta g      at the new point
    x, y, d_x, d_y <- their means

The method moves before it estimates: it is `fedmuon_ma` with plain steps. The paper's step size is alpha eta and its
weight alpha b; lr and beta here are these products. beta weighs the NEW gradient. 0.9 is read literally from Zhang and
Gao 2025, whose experiments may as well mean 0.1. Uncertain: the recursion was not read in the paper.

Departures:
- All clients take part in the paper; here the mean over the cohort stands for the mean over all.
- lr and beta are the products alpha eta and alpha b of the paper's rates.
- With start = "batch" the first step of round 1 estimates and does not move, so that the first round takes K - 1 steps.
- The dual is not projected.
"""

from __future__ import annotations

from .fedmuon_ma import FedMuonMA, FirstMomentum
from .parts.groups import Number
from .parts.rules import Sgd


def local_sgdam(lr: Number = 0.1, beta: Number = 0.9, start: FirstMomentum = "batch") -> FedMuonMA:
    """lr: local step size, or one for each group, {primal: 0.01, dual: 0.1}; beta: weight of the new gradient, or one
    for each group; start: the first momentum is the gradient on the first batch (batch), the mean gradient of one pass
    over all clients (gradient), or 0 (zeros)."""
    return FedMuonMA(Sgd(lr), beta, start)

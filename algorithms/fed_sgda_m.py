"""FedSGDA-M (STORM reconstruction): local descent-ascent along variance-reduced estimates, which are averaged too.

Wu, Sun, Hu, Zhang, Huang, NeurIPS 2023 ("Solving a class of non-convex minimax optimization in federated learning"),
arXiv:2310.03613.

    K times: x_i+ <- x_i - lr u_i,  y_i+ <- y_i + lr v_i
             u_i  <- g_x(x_i+, y_i+) + (1 - a) (u_i - g_x(x_i, y_i))      both on the same batch; v_i likewise
    x, y, u, v <- their means

Two gradients a step; `local_sgdam` with STORM's estimate. Uncertain: the algorithm's box was not found; this is rebuilt
from what others say of it (STORM, full participation, everything averaged). So open are: whether the step is taken
before or after averaging the estimates (before, here, and the previous point of a round's first correction is the
averaged one), whether there is a server's step size (none here), and the schedules of lr and a (any setting may be
one). `stem` averages first and keeps the previous point. start: of the estimate, see `local_sgdam`; the paper has a
large first batch, which is `gradient`.

Departures:
- All clients take part in the paper; here the mean over the cohort stands for the mean over all.
- The rules are rebuilt from descriptions, see above.
- With start = "batch" the first round takes K - 1 steps and not K, and the first estimate is of one batch and not of a
  large one.
"""

from __future__ import annotations

from .fedmuon_ma import FedMuonMA, Start
from .parts.groups import Number
from .parts.rules import Sgd


def fed_sgda_m(lr: Number = 0.1, a: Number = 0.1, start: Start = "batch") -> FedMuonMA:
    """lr: local step size, or one for each group, {primal: 0.01, dual: 0.1}; a: weight of the new gradient, 1 is
    LocalSGDA one step late, or one for each group; start: the first estimate, from the first batch, one pass over all
    clients, or zeros."""
    return FedMuonMA(Sgd(lr), a, start, reduced=True)

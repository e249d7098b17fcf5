"""FedSGDA-M (STORM reconstruction): local descent-ascent along variance-reduced estimates, which are averaged too.

Wu, Sun, Hu, Zhang, Huang, NeurIPS 2023 ("Solving a class of non-convex minimax optimization in federated learning"),
arXiv:2310.03613.

Choose it for min-max problems with noisy batches where two gradients per step can be afforded: it is LocalSGDAM with
the variance-reduced estimate of STORM. It is a reconstruction, see the notes; in the paper all clients take part.

    K times: x_i+ <- x_i - lr u_i,  y_i+ <- y_i + lr v_i
             u_i  <- g_x(x_i+, y_i+) + (1 - a) (u_i - g_x(x_i, y_i))      both on the same batch; v_i likewise
    x, y, u, v <- their means

It takes two gradients per step and is `local_sgdam` with STORM's estimate. start is that of the estimate, see
`local_sgdam`; the paper has a large first batch, which is `gradient`. `stem` averages first and keeps the previous
point.

Uncertain: the algorithm's box was not found, and this is rebuilt from what others say of it (STORM, full participation,
everything averaged). Three things are open. First, whether the step is taken before or after the estimates are
averaged: here it is before, and the previous point of a round's first correction is the averaged one. Second, whether
there is a server's step size: here there is none. Third, the schedules of lr and a: any setting may be a schedule.

Departures:
- All clients take part in the paper; here the mean over the cohort stands for the mean over all.
- The rules are rebuilt from descriptions, see above.
- With start = "batch" the first round takes K - 1 steps and not K, and the first estimate is of one batch and not of a
  large one.
"""

from __future__ import annotations

from .fedmuon_ma import FedMuonMA, FirstMomentum
from .parts.groups import Number
from .parts.rules import Sgd


def fed_sgda_m(lr: Number = 0.1, a: Number = 0.1, start: FirstMomentum = "batch") -> FedMuonMA:
    """lr: local step size, or one for each group, {primal: 0.01, dual: 0.1}; a: weight of the new gradient, or one for
    each group, 1 is LocalSGDA one step late; start: the first estimate is the gradient on the first batch (batch), the
    mean gradient of one pass over all clients (gradient), or 0 (zeros)."""
    return FedMuonMA(Sgd(lr), a, start, reduced=True)

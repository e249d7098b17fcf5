"""FedSGDA-Clip: Fed-NSGDA-M with clipped steps instead of normalised ones.

Zhang, Gao 2025 ("Federated Stochastic Minimax Optimization under Heavy-Tailed Noises"), arXiv:2511.04456, the baseline
of its experiments. What it shares with the paper's other methods is in `parts/controlled_momentum.py`.

Choose it as the baseline of Fed-NSGDA-M and FedMuon-DA, with their traffic and state: it clips long steps, and short
ones keep their length.

    x_i <- x_i - lr_x min(1, radius / |u|) u,  y_i <- y_i + lr_y min(1, radius / |v|) v      a norm for each group

radius = 0.1 for both groups is the paper's; beta as in `fed_nsgda_m`. Where every norm is above the radius this is
Fed-NSGDA-M with lr and gamma times the radius; without clipping and with beta = 1 it is `sagda`.

Departures:
- All clients take part in the paper; in a cohort h moves by S/N, see `controlled_momentum`, and u follows it.
- Clients are sent c = beta h + (1 - beta) u instead of h and u, two trees and not three.
- Means are uniform, whatever the federation's client weights are.
- With unequal numbers of local steps each client's displacement is divided by its own K.
- gamma = lr K, the plain mean, is a default of ours.
"""

from __future__ import annotations

from .parts.controlled_momentum import ControlledMomentum, controlled_momentum
from .parts.groups import Number
from .parts.rules import Clip, Sgd


def fed_sgda_clip(
    lr: Number = 0.1, gamma: Number | None = None, beta: Number = 0.9, radius: float = 0.1
) -> ControlledMomentum:
    """lr: local step size, or one for each group, {primal: 0.01, dual: 0.1}; gamma: the server's step size, or one for
    each group, lr K unless given; beta: weight of the new gradient; radius: largest norm of a direction."""
    return controlled_momentum(Clip(Sgd(lr), radius), lr, gamma, beta)

"""Fed-NSGDA-M: normalised descent-ascent with momentum and control variates, for heavy-tailed noise.

Zhang, Gao 2025 ("Federated Stochastic Minimax Optimization under Heavy-Tailed Noises"), arXiv:2511.04456, Algorithm 1.
What it shares with the paper's other methods is in `parts/controlled_momentum.py`.

Choose it for min-max problems whose gradients have heavy tails and whose clients differ and can keep a vector of the
model's size: all local steps have the same length, whatever the gradients are. Step sizes are lengths; the traffic is
twice that of LocalSGDA, and in the paper all clients take part.

    x_i <- x_i - lr_x u / |u|,  y_i <- y_i + lr_y v / |v|

|u| is the norm of the whole primal as one vector, |v| that of the dual. A dual of a single number therefore moves by
lr_y in the direction of v's sign.
beta = 0.9 is the paper's number, on the NEW gradient as in its Algorithm 1. The usual reading of "momentum 0.9", which
its theory is closer to, is beta = 0.1. With `parameter_free: true` all sizes are those of Theorem 1, in which gamma_x
is a tenth of gamma_y over the condition number; see `controlled_momentum`.

Departures:
- All clients take part in the paper; in a cohort h moves by S/N, see `controlled_momentum`, and u follows it.
- Clients are sent c = beta h + (1 - beta) u instead of h and u, two trees and not three.
- Means are uniform, whatever the federation's client weights are.
- With unequal numbers of local steps each client's displacement is divided by its own K.
- gamma = lr K, the plain mean, is a default of ours.
- A norm below 1e-12 counts as 1e-12.
"""

from __future__ import annotations

from .parts.controlled_momentum import ControlledMomentum, SizedByTheorem, with_sizes
from .parts.groups import Number
from .parts.rules import Normalised


def fed_nsgda_m(
    lr: Number | None = None,
    gamma: Number | None = None,
    beta: Number | None = None,
    parameter_free: bool = False,
    condition: float | None = None,
) -> ControlledMomentum | SizedByTheorem:
    """lr: length of a local step, or one for each group, {primal: 0.01, dual: 0.1}, 0.01 unless given; gamma: the
    server's step size, or one for each group, lr K unless given; beta: weight of the new gradient, 0.9 unless given;
    parameter_free: `lr`, `gamma` and `beta` follow from the run's sizes and may not be given; condition: the problem's
    condition number for them, at least 1, and 1 unless given."""
    return with_sizes(Normalised, lr, gamma, beta, parameter_free, condition)

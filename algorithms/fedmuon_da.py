"""FedMuon-DA: Muon's steps for min-max, with momentum and control variates.

Zhang, Gao 2025 ("Federated Stochastic Minimax Optimization under Heavy-Tailed Noises"), arXiv:2511.04456, Algorithm 2;
what is common with its other methods is in `controlled_momentum`.

    per matrix    X_i <- X_i - lr_x P Q^T of u = P S Q^T,  Y_i <- Y_i + lr_y R T^T likewise
    a vector      takes u / |u| by its own norm, a lone number the sign of u

The second line is what the first comes to for an m x 1 and a 1 x 1 matrix; the paper does not say what becomes of them.
So a dual of one number, which has no matrix in it, takes steps of its sign, as in Fed-NSGDA-M. The layer scale is none,
the paper's; it writes an SVD and says that Newton-Schulz is run: ball = svd is the former, the default the latter with
Jordan's coefficients, whose singular values end between 0.5 and 1.5. beta as in `fed_nsgda_m`.

Departures:
- The paper has everyone take part; in a cohort h moves by S/N, as in `controlled_momentum`, and u follows it.
- Clients are sent c = beta h + (1 - beta) u in the place of h and u, two trees and not three.
- Means are uniform, whatever the federation's weights are.
- With unequal numbers of local steps each client's displacement is divided by its own K.
- gamma = lr K, the plain mean, is a default of ours.
- A vector takes steps along u / |u| by its own norm, which the paper leaves open.
- Newton-Schulz iterations stand for the singular value decomposition unless ball = "svd".
"""

from __future__ import annotations

from .parts.controlled_momentum import ControlledMomentum, controlled_momentum
from .parts.groups import Number
from .parts.muon import UNNAMED, Ball, Spectral
from .parts.rules import Normalised


def fedmuon_da(
    lr: Number = 0.01,
    gamma: Number | None = None,
    beta: Number = 0.9,
    ball: Ball = UNNAMED,
) -> ControlledMomentum:
    """lr: local step size, or one for each group, {primal: 0.01, dual: 0.1}; gamma: step size of the server, lr K
    unless given, or one for each group; beta: weight of the new gradient; ball: how matrices are orthogonalised."""
    rule = Spectral(lr, Normalised(lr, over="tensor"), ball, "none")
    return controlled_momentum(rule, lr, gamma, beta)

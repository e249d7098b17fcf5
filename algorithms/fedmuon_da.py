"""FedMuon-DA: Muon's steps for min-max, with momentum and control variates.

Zhang, Gao 2025 ("Federated Stochastic Minimax Optimization under Heavy-Tailed Noises"), arXiv:2511.04456, Algorithm 2.
What it shares with the paper's other methods is in `parts/controlled_momentum.py`.

Choose it where you would choose Fed-NSGDA-M and most weights are matrices: Muon's steps bring all singular values near
1. Every step must orthogonalise the matrices; traffic and state are those of Fed-NSGDA-M.

    per matrix    X_i <- X_i - lr_x P Q^T of u = P S Q^T,  Y_i <- Y_i + lr_y R T^T likewise
    per vector    a step along u / |u| by the vector's own norm; a lone number takes the sign of u

The second line is what the first gives for an m x 1 and a 1 x 1 matrix; the paper does not say what happens to vectors.
So a dual of one number, which has no matrix in it, takes steps of its sign, as in Fed-NSGDA-M. The layer scale is none,
as in the paper. The paper's algorithm has a singular value decomposition, and its text says that Newton-Schulz
iterations replace it. These iterations, with Jordan's coefficients, are the default; their singular values end between
0.5 and 1.5. ball = svd computes the decomposition. beta as in `fed_nsgda_m`. With `parameter_free: true` all sizes are
those of Theorem 2, which are those of Theorem 1; see `controlled_momentum`.

Departures:
- All clients take part in the paper; in a cohort h moves by S/N, see `controlled_momentum`, and u follows it.
- Clients are sent c = beta h + (1 - beta) u instead of h and u, two trees and not three.
- Means are uniform, whatever the federation's client weights are.
- With unequal numbers of local steps each client's displacement is divided by its own K.
- gamma = lr K, the plain mean, is a default of ours.
- A vector takes steps along u / |u| by its own norm, which the paper leaves open.
- Newton-Schulz iterations stand for the singular value decomposition unless ball = "svd".
"""

from __future__ import annotations

from functools import partial

from .parts.controlled_momentum import ControlledMomentum, SizedByTheorem, with_sizes
from .parts.groups import Number
from .parts.muon import UNNAMED, Ball, Spectral
from .parts.rules import Normalised


def _rule(ball: Ball, lr: Number) -> Spectral:
    """The local step of this length."""
    return Spectral(lr, Normalised(lr, over="tensor"), ball, "none")


def fedmuon_da(
    lr: Number | None = None,
    gamma: Number | None = None,
    beta: Number | None = None,
    ball: Ball = UNNAMED,
    parameter_free: bool = False,
    condition: float | None = None,
) -> ControlledMomentum | SizedByTheorem:
    """lr: local step size, or one for each group, {primal: 0.01, dual: 0.1}, 0.01 unless given; gamma: the server's
    step size, or one for each group, lr K unless given; beta: weight of the new gradient, 0.9 unless given; ball: how
    matrices are orthogonalised; parameter_free: `lr`, `gamma` and `beta` follow from the run's sizes and may not be
    given; condition: the problem's condition number for them, at least 1, and 1 unless given."""
    return with_sizes(partial(_rule, ball), lr, gamma, beta, parameter_free, condition)

"""FedMUD+F: clients train one factor of a low-rank update; the other one is fixed at random.

Li, Luo, Wang, Tang, Xu, Luo, Li, He, Li, ICML 2025 ("The Panaceas for Improving Low-Rank Decomposition in
Communication-Efficient Federated Learning"). The authors' code settles what the text leaves open.

Choose it to compare with FedMUD+AAD, for the same bytes: one factor is frozen at random, so that the mean is exact and
the rank twice that of FedMUD. In its paper FedMUD+AAD is mostly more accurate.

    W~ = W + P(U~, V), W frozen;  P(U, V) = U V^T, U and V of rank r
    U~ fixed at random, V = 0 at first
    K local steps on V and all that is not compressed;  V <- mean V_i
    every `reset` rounds: W <- W + P(U~, V), U~ drawn anew, V = 0

P(U~, V) is linear in V, so that the mean of the factors makes exactly the mean of the updates, which `fedmud` misses by
a covariance. Since one factor alone is sent, it allows twice the rank for the same traffic. Everything drawn is U(-a,
a), counted by the run's seed and the number of the draw. In the compressed layers the method depends on the step size
and a through lr a^2 alone (with plain SGD). Server rules and rules with states need reset = 0.

Departures:
- The text's ratio 2 (m + n) r / (m n) is (m + n) r / (m n), as in the code.
- All draws are counted by the run's seed; the code draws every layer of the first round with one constant.
- The weights of the mean are the federation's; the code's are numbers of minibatches.
"""

from __future__ import annotations

from .fedavg import Plain
from .local import LocalMethod, Rule
from .parts.compression import RATIO, Compressed, updates
from .parts.matrices import Layers, Reshape
from .parts.rules import Sgd
from .parts.servers import Mean


def fedmud_f(
    rule: Rule = Sgd(0.1),
    ratio: float = RATIO,
    a: float = 0.5,
    reset: int = 1,
    reshape: Reshape = "raw",
    layers: Layers = "inner",
    nearest: bool = False,
    server_lr: float = 1.0,
) -> Compressed:
    """rule: the local optimiser of the factors and of all that is not compressed; ratio: numbers sent over numbers of
    the model; a: factors are drawn from U(-a, a); reset: rounds between merges, 0 for none; reshape: how a convolution
    becomes a matrix, raw or permuted; layers: inner leaves out the first and the last weight, all compresses every
    weight; nearest: where the ratio cannot be reached, the smallest achievable one is taken."""
    method = LocalMethod(rule, Plain(), Mean(server_lr))
    return Compressed(method, updates(ratio, a, reset, "frozen", "low_rank", reshape, layers, nearest))

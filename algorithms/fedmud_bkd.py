"""FedMUD+BKD: clients train an update of frozen weights that is made of blocks of Kronecker products.

Li, Luo, Wang, Tang, Xu, Luo, Li, He, Li, ICML 2025 ("The Panaceas for Improving Low-Rank Decomposition in
Communication-Efficient Federated Learning"). The authors' code settles what the text leaves open.

Choose it in place of FedMUD when updates need a higher rank for the same bytes. As in FedMUD, the mean of its factors
is not exactly the mean of its updates.

    W~ = W + P(U, V), W frozen;  P(U, V) = blocks of Kronecker products U_b (x) V_b
    K local steps on U, V and all that is not compressed;  U <- mean U_i, V <- mean V_i
    every `reset` rounds: W <- W + P(U, V), U drawn anew, V = 0

Everything drawn is U(-a, a), counted by the run's seed and the number of the draw. Server rules and rules with states
need reset = 0.

Departures:
- The text's ratio 2 (m + n) r / (m n) is (m + n) r / (m n), as in the code.
- Kronecker blocks lie one after the other, as in the code; "kronecker_grid" of the compression `updates` is the text's
  layout.
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


def fedmud_bkd(
    rule: Rule = Sgd(0.1),
    ratio: float = RATIO,
    a: float = 1.0,
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
    return Compressed(method, updates(ratio, a, reset, "pair", "kronecker", reshape, layers, nearest))

"""FedLMT: every compressed weight is a product of two factors; plain FedAvg trains the factors.

Liu, Zhou, Wu, Hu, Guizani, Sheng, ICML 2024 ("FedLMT: Tackling System Heterogeneity of Federated Learning via Low-Rank
Model Training with Theoretical Guarantees").

Choose it when a model of low rank is good enough and clients can keep no state: nothing is truncated. The factors are
the same variables in every round, so that server rules and control variates can act on them.

    W = U V^T, in the reshape (o h) x (i w): a 1 x w convolution i -> r, then an h x 1 one r -> o
    K local steps on U, V and all that is not compressed;  U <- mean U_i, V <- mean V_i

The defaults are those of the comparison in Li et al. 2025: one ratio for all layers, factors from U(-a, a), first and
last weight left out. draw = "fan_out" is the paper's own start, Kaiming's normal. Since the variables are the same in
every round, the compression `factors` can be combined with server rules and control variates.

Departures:
- Factors start in U(-a, a) unless draw says otherwise, as Li et al. 2025 compare the method; the paper's own start is
  draw = "fan_out".
- One ratio sets the ranks of all layers but the first and the last; the paper's rank is a share of the output channels,
  and which stages are factored is chosen by data set.
- The paper's optional decay of |U V^T|^2 is left out.
"""

from __future__ import annotations

from .fedavg import Plain
from .local import LocalMethod, Rule
from .parts.compression import RATIO, Compressed, factors
from .parts.matrices import Layers, Reshape
from .parts.reparameterisation import Draw
from .parts.rules import Sgd
from .parts.servers import Mean


def fedlmt(
    rule: Rule = Sgd(0.1),
    ratio: float = RATIO,
    a: float | None = None,
    draw: Draw = "uniform",
    reshape: Reshape = "permuted",
    layers: Layers = "inner",
    nearest: bool = False,
    server_lr: float = 1.0,
) -> Compressed:
    """rule: the local optimiser of the factors and of all that is not compressed; ratio: numbers sent over numbers of
    the model; a: factors start in U(-a, a), 0.5 unless given; draw: uniform, or normal with variance 2 / fan_in or 2 /
    fan_out, where the fans are those of the two layers that stand for the weight; reshape: how a convolution becomes a
    matrix, raw or permuted; layers: inner leaves out the first and the last weight, all compresses every weight;
    nearest: where the ratio cannot be reached, the smallest achievable one is taken."""
    method = LocalMethod(rule, Plain(), Mean(server_lr))
    return Compressed(method, factors(ratio, a, draw, reshape, layers, nearest))

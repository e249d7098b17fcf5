"""FedPara: every compressed weight is the entrywise product of two low-rank matrices; FedAvg trains the factors.

Hyeon-Woo, Ye-Bin, Oh, ICLR 2022, arXiv:2108.06098.

Choose it when FedLMT's rank is too low: entrywise products of low-rank matrices can have a higher one for the same
bytes. For a weight that is a matrix this needs a ratio at which FedLMT's rank is above 4.

    W = (X1 Y1^T) * (X2 Y2^T), of rank R^2 at most, 2 R (m + n) numbers
    a convolution: W_j = sum over a, b of T_j[a, b] O_j[a, o] I_j[b, i], W = W_1 * W_2, 2 (R (o + i) + R^2 h w) numbers

The defaults are those of the comparison in Li et al. 2025: factors from U(-a, a). draw = "fan_in" is the paper's start,
He's normal on every factor. form = "matrix" reshapes convolutions to (o h) x (i w).

Departures:
- R is at least 1 and not ceil(sqrt(max(o, i))), the paper's guarantee of full rank, which breaks a ratio of 1/32 on
  small layers.
- Factors start in U(-a, a) unless draw says otherwise, as Li et al. 2025 compare the method; the paper's own start is
  draw = "fan_in".
- The paper's optional tanh and Jacobian correction are left out, as in the code that it released.
"""

from __future__ import annotations

from typing import Literal

from .fedavg import Plain
from .local import LocalMethod, Rule
from .parts.compression import RATIO, Compressed, hadamard
from .parts.matrices import Layers
from .parts.reparameterisation import Draw
from .parts.rules import Sgd
from .parts.servers import Mean


def fedpara(
    rule: Rule = Sgd(0.1),
    ratio: float = RATIO,
    a: float | None = None,
    draw: Draw = "uniform",
    form: Literal["tensor", "matrix"] = "tensor",
    layers: Layers = "inner",
    nearest: bool = False,
    server_lr: float = 1.0,
) -> Compressed:
    """rule: the local optimiser of the factors and of all that is not compressed; ratio: numbers sent over numbers of
    the model; a: factors start in U(-a, a), 1 unless given; draw: uniform, or normal with variance 2 / fan_in or 2 /
    fan_out; form: whether a convolution is factored as a tensor or as a matrix; layers: inner leaves out the first and
    the last weight, all compresses every weight; nearest: where the ratio cannot be reached, the smallest achievable
    one is taken."""
    method = LocalMethod(rule, Plain(), Mean(server_lr))
    return Compressed(method, hadamard(ratio, a, draw, form, layers, nearest))

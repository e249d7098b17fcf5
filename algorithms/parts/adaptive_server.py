"""FedOpt: a server that treats the mean displacement as a pseudo-gradient and takes an adaptive step along it.

Reddi et al., ICLR 2021, arXiv:2003.00295, Algorithm 2.

    delta <- mean(y_K - x)
    m <- beta1 m + (1 - beta1) delta
    v <- the method's second moment of delta
    x <- x + server_lr m / (sqrt(v) + tau)

v starts at tau^2 as in the algorithm; v_init = 0 is what the official code, Flower and Takakura et al. 2025 do. There
is no bias correction, as in the algorithm; bias_correction = true multiplies the step by sqrt(1 - beta2^t) / (1 -
beta1^t) with t the number of the round from 1, as in Keras, and hence in the official code's Adam and Yogi. Flower's
FedAdam has t + 1. Takakura et al. use v_init = 0 and tau = 1e-9. 0 / 0 counts as 0, for tau = 0.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..contract import Round
from ..local import ServerRule
from ..tree import Tree
from .checks import fraction, nonnegative, positive
from .servers import quotient


class TwoMoments(NamedTuple):
    m: Tree
    v: Tree


@dataclass(frozen=True)
class AdaptiveServer(ServerRule):
    """State: m and v. v_init: v at first, None for tau^2."""

    lr: float = 0.01
    betas: tuple[float, float] = (0.9, 0.99)
    tau: float = 1e-3
    v_init: float | None = None
    bias_correction: bool = False

    def __post_init__(self) -> None:
        positive(server_lr=self.lr)
        fraction(beta1=self.betas[0], beta2=self.betas[1])
        nonnegative(tau=self.tau, v_init=self.v_init or 0.0)

    def init(self, x: Tree) -> TwoMoments:
        start = self.tau**2 if self.v_init is None else self.v_init
        return TwoMoments(x.zeros(), Tree(torch.full_like(x.flat, start), x.layout))

    @abstractmethod
    def second(self, v: Tree, square: Tree) -> Tree:
        """The next v from delta^2."""

    def step(self, x: Tree, delta: Tree, norm2: Tensor, state: TwoMoments, round: Round) -> tuple[Tree, TwoMoments]:
        b1, b2 = self.betas
        m, v = state.m.lerp(delta, 1 - b1), self.second(state.v, delta * delta)
        lr = self.lr
        if self.bias_correction:
            lr = lr * (1 - b2**round.number) ** 0.5 / (1 - b1**round.number)
        return x.add(quotient(m, Tree(v.flat.sqrt() + self.tau, v.layout)), lr), TwoMoments(m, v)

    def rate(self, x: Tree, delta: Tree, norm2: Tensor, state: TwoMoments, round: Round) -> float:
        """Without the correction of the moments' start, which is no step size of the paper's."""
        return self.lr

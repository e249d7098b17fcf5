"""FedOpt: an adaptive server on the mean displacement. FedAdagrad, FedAdam, FedYogi.

Reddi et al., ICLR 2021, arXiv:2003.00295, Algorithm 2.

    delta <- mean(y_K - x)
    m <- beta1 m + (1 - beta1) delta                           beta1 = 0 for Adagrad
    v <- v + delta^2                                           adagrad
         beta2 v + (1 - beta2) delta^2                         adam
         v - (1 - beta2) delta^2 sign(v - delta^2)             yogi
    x <- x + server_lr m / (sqrt(v) + tau)

Uncertain points. v starts at tau^2 as in the algorithm; v_init = 0 is what the official code, Flower and Takakura et
al. 2025 do. No bias correction, as in the algorithm; bias_correction = true multiplies the step by sqrt(1 - beta2^t) /
(1 - beta1^t), t the round from 1, as Keras has it (hence the official code's Adam and Yogi); Flower's FedAdam has t +
1. Takakura et al.: v_init = 0, tau = 1e-9. server_lr is ours; the paper tunes it.

Departures:
- 0 / 0 = 0, for tau = 0.
- The mean of the displacements has the federation's client weights, uniform unless it says otherwise; the algorithm's
  are uniform, and its experiments weigh by examples.
- v_init and bias_correction are options for what other programs do.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .contract import Round
from .local import LocalMethod, Rule, ServerRule
from .parts.adapted import Shown, Work, adapted
from .parts.compression import Compressed, Compression
from .parts.rules import Sgd, fraction, nonnegative, positive
from .tree import Tree


class TwoMoments(NamedTuple):
    m: Tree
    v: Tree


def quotient(a: Tree, b: Tree) -> Tree:
    """a / b entry by entry, b >= 0; 0 where b = 0."""
    return Tree(torch.where(b.flat > 0, a.flat / b.flat, 0.0), a.layout)


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


class Adagrad(AdaptiveServer):
    def second(self, v: Tree, square: Tree) -> Tree:
        return v + square


class AdamServer(AdaptiveServer):
    def second(self, v: Tree, square: Tree) -> Tree:
        return v.lerp(square, 1 - self.betas[1])


class Yogi(AdaptiveServer):
    def second(self, v: Tree, square: Tree) -> Tree:
        return v.add(square * (v - square).sign(), self.betas[1] - 1)


def fedadagrad(
    rule: Rule = Sgd(0.1),
    server_lr: float = 0.1,
    tau: float = 1e-3,
    v_init: float | None = None,
    local: Work = "plain",
    mu: float | None = None,
    evaluate: Shown = "last",
    compression: Compression | None = None,
) -> LocalMethod | Compressed:
    """rule: the local optimiser; v_init: None for tau^2; local, mu, evaluate, compression: see `adapted`."""
    return adapted(Adagrad(server_lr, (0.0, 0.0), tau, v_init), rule, local, mu, evaluate, compression)


def _with_moments(server: type[AdaptiveServer]) -> Callable[..., LocalMethod | Compressed]:
    """FedAdam and FedYogi have the same arguments."""

    def recipe(
        rule: Rule = Sgd(0.1),
        server_lr: float = 0.01,
        betas: tuple[float, float] = (0.9, 0.99),
        tau: float = 1e-3,
        v_init: float | None = None,
        bias_correction: bool = False,
        local: Work = "plain",
        mu: float | None = None,
        evaluate: Shown = "last",
        compression: Compression | None = None,
    ) -> LocalMethod | Compressed:
        """rule: the local optimiser; v_init: None for tau^2; local, mu, evaluate, compression: see `adapted`."""
        return adapted(server(server_lr, betas, tau, v_init, bias_correction), rule, local, mu, evaluate, compression)

    return recipe


fedadam = _with_moments(AdamServer)
fedyogi = _with_moments(Yogi)

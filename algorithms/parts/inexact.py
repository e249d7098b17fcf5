"""How far steps by Newton-Schulz iterations are from exact ones: kappa and p of a run.

Takezawa et al. 2025, arXiv:2509.26337, theorem 3 and lemma 12. T iterations with the coefficients 15/8, -5/4 and 3/8
make G^(T) of a direction G, with <G, G^(T)> >= |G|_p in Schatten's norm of the order

    p = 1 + log(1 - (1 - kappa)^(1.5^T)) / log(kappa)      kappa = min s_j / |s| over the singular values s_j > 0 of G

p is 2 for T = 0 and falls to 1, that of exact steps, as T grows. Where kappa = 1, so that all norms of G are the same,
p is the limit of the formula: 2 for T = 0, else 1. In the theorem kappa is the minimum over all matrices G, local
steps, clients and rounds, and the gradient is measured in the norm of its order p.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..local import Rule
from ..tree import Tree
from .muon import Ball, NewtonSchulz, Spectral, Svd, parts


def least_share(m: Tensor) -> Tensor:
    """kappa, (), of the matrices on the last two axes of m (..., rows, cols); 1 for matrices of zeros. Singular values
    below max(rows, cols) roundings of the largest count as zeros."""
    s = torch.linalg.svdvals(m.nan_to_num())  # a run that diverges says so at the end of the round
    s = s / s.amax(-1, keepdim=True).clamp(min=torch.finfo(m.dtype).tiny)  # whose squares do not overflow
    norm = torch.linalg.vector_norm(s, dim=-1, keepdim=True).clamp(min=1.0)
    return torch.where(s > max(m.shape[-2:]) * torch.finfo(m.dtype).eps, s / norm, 1.0).amin()


def order(kappa: Tensor, iterations: float) -> Tensor:
    """p, shaped like kappa, float64, NaN where kappa is; iterations: T, infinity for exact steps."""
    if iterations == 0:
        return 0 * kappa.double() + 2
    k = torch.where(kappa == 1, 0.5, kappa.double())
    p = 1 + torch.log(-torch.expm1(1.5**iterations * torch.log1p(-k))) / torch.log(k)
    return torch.where(kappa == 1, 1.0, p)


def iterations_of(ball: Ball) -> float | None:
    """T, where the theorem is about the steps of this ball; else None."""
    if isinstance(ball, NewtonSchulz) and ball.scheme == "classic":
        return ball.iterations
    return math.inf if isinstance(ball, Svd) else None


class Watched(NamedTuple):
    kappa: Tensor  # (), the least so far; NaN without matrices
    rule: Any  # the wrapped rule's state


@dataclass(frozen=True)
class Inexact(Rule):
    """The wrapped rule. Its facts are kappa, the least over the matrices and local steps of a client's round, and
    `schatten_order`, the p that follows from it, where the theorem is about the wrapped rule's ball."""

    rule: Spectral

    def init(self, x: Tree) -> Watched:
        first = 1.0 if parts(x.layout, self.rule.aux).matrices else math.nan
        return Watched(x.flat.new_full((), first), self.rule.init(x))

    def step(self, y: Tree, v: Tree, state: Watched) -> tuple[Tree, Watched]:
        y, rule = self.rule.step(y, v, state.rule)
        kappa = state.kappa
        for shape, names in parts(v.layout, self.rule.aux).matrices.items():
            kappa = torch.minimum(kappa, least_share(torch.stack([v[name].reshape(shape) for name in names])))
        return y, Watched(kappa, rule)

    def facts(self, state: Watched) -> dict[str, Tensor]:
        iterations = iterations_of(self.rule.ball)
        known = {} if iterations is None else {"schatten_order": order(state.kappa, iterations)}
        return {"kappa": state.kappa, **known}

"""What the server does with the mean of the clients' displacements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ..contract import Round
from ..local import ServerRule
from ..tree import Tree
from .checks import one_of, positive
from .groups import Number, PerGroup

Over = Literal["cohort", "all"]
"""The clients that the mean is over."""


def ratio(a: Tensor, b: Tensor) -> Tensor:
    """a / b entry by entry, for b >= 0; 0 where b = 0."""
    return torch.where(b > 0, a / b, 0.0)


def quotient(a: Tree, b: Tree) -> Tree:
    """a / b entry by entry, for b >= 0; 0 where b = 0."""
    return Tree(ratio(a.flat, b.flat), a.layout)


@dataclass(frozen=True)
class Mean(ServerRule):
    """x <- x + lr * mean of (y_K - x).

    over = "cohort": the mean over the S sampled clients. over = "all": the mean over all N clients, where those that
    were not sampled count as not having moved. It is the mean over the cohort with lr * S / N (Takezawa et al. 2025,
    for all its methods), or lr * D / N where a sampler has weights and divides by D, their sum if it normalises. Client
    weights without such a sampler are scaled so that those of a cohort sum to S: with weights: examples the cohort
    counts for S / N of all clients, whatever its share of the examples is (mean: unbiased counts this share).
    """

    lr: Number = 1.0
    over: Over = "cohort"

    def __post_init__(self) -> None:
        positive(lr=self.lr)
        one_of("cohort", "all", over=self.over)

    def step(self, x: Tree, delta: Tree, norm2: Tensor, state: Any, round: Round) -> tuple[Tree, Any]:
        return x.add(delta, self._cohort_lr(round)), state

    def rate(self, x: Tree, delta: Tree, norm2: Tensor, state: Any, round: Round) -> Tensor | float:
        lr = self._cohort_lr(round)
        return super().rate(x, delta, norm2, state, round) if isinstance(lr, PerGroup) else lr

    def _cohort_lr(self, round: Round) -> Number:
        """The step size along the mean over the cohort."""
        return self.lr * (round.moved_share if self.over == "all" else 1.0)

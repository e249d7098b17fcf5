"""What the server does with the mean of the clients' displacements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ..contract import Round
from ..local import ServerRule
from ..tree import Tree
from .groups import Number, PerGroup
from .rules import positive


def ratio(a: Tensor, b: Tensor) -> Tensor:
    """a / b entry by entry, for b >= 0; 0 where b = 0."""
    return torch.where(b > 0, a / b, 0.0)


def quotient(a: Tree, b: Tree) -> Tree:
    """a / b entry by entry, for b >= 0; 0 where b = 0."""
    return Tree(ratio(a.flat, b.flat), a.layout)


@dataclass(frozen=True)
class Mean(ServerRule):
    """x <- x + lr * mean of (y_K - x).

    over = "cohort": the mean over the S sampled clients. over = "all": clients that were not sampled count as not
    having moved, (1/N) * sum over S, which is the first with lr * S / N (Takezawa et al. 2025, for all its methods).
    """

    lr: Number = 1.0
    over: Literal["cohort", "all"] = "cohort"

    def __post_init__(self) -> None:
        positive(lr=self.lr)
        if self.over not in ("cohort", "all"):
            raise ValueError(f"over must be cohort or all, got {self.over!r}")

    def step(self, x: Tree, delta: Tree, norm2: Tensor, state: Any, round: Round) -> tuple[Tree, Any]:
        return x.add(delta, self._of_mean(round)), state

    def rate(self, x: Tree, delta: Tree, norm2: Tensor, state: Any, round: Round) -> Tensor | float:
        lr = self._of_mean(round)
        return super().rate(x, delta, norm2, state, round) if isinstance(lr, PerGroup) else lr

    def _of_mean(self, round: Round) -> Number:
        """The step along the cohort's mean."""
        return self.lr * (round.share if self.over == "all" else 1.0)

"""Noise of a binary tree over the rounds (DP-FTRL).

Kairouz et al., ICML 2021, arXiv:2103.00039; Honaker 2015. Node (h, j) covers the rounds j 2^h + 1 ... (j + 1) 2^h and
has its own normal draw. The sum over all rounds so far carries the noise of the fewest nodes that cover them:

    plain      N_t = sum over set bits h of t of nu(h, (t >> h) - 1)
    honaker    V(0, j) = nu(0, j);  V(h, j) = nu(h, j) + (V(h-1, 2j) + V(h-1, 2j+1)) / 2
               N_t = sum over set bits h of t of V(h, (t >> h) - 1) / (2 - 2^-h)

and n_t = N_t - N_(t-1). Honaker's estimate of a node also uses the draws below it, at no cost of privacy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .mechanism import Composition, Draw, Mechanism

LEVELS = 31
"""Levels of the tree over the largest number of rounds that a configuration can have."""


@dataclass(frozen=True)
class BinaryTree(Mechanism):
    """Noise of a binary tree. `honaker`: whether a node's estimate uses the draws below it.

    The state of `honaker` is V of the node that each set bit of t stands for, level by level; a level that the run does
    not reach has empty tensors. The plain tree draws its noise again and keeps nothing.
    """

    honaker: bool = True

    def init(self, zeros: Sequence[Tensor], rounds: int) -> Any:
        if not self.honaker:
            return ()
        reached = rounds.bit_length()
        return tuple([leaf.clone() if h < reached else leaf.new_empty(0) for leaf in zeros] for h in range(LEVELS))

    def noise(self, t: int, draw: Draw, state: Any) -> tuple[list[Tensor], Any]:
        return self._honaker(t, draw, state) if self.honaker else (self._plain(t, draw), state)

    def _plain(self, t: int, draw: Draw) -> list[Tensor]:
        """The draw of the node that round t completes, without those of the nodes that it replaces."""
        h = completed(t)
        found = draw("tree", h, (t >> h) - 1)
        for level in range(h):
            found = [a.sub_(b) for a, b in zip(found, draw("tree", level, ((t - 1) >> level) - 1), strict=True)]
        return found

    def _honaker(self, t: int, draw: Draw, state: Any) -> tuple[list[Tensor], Any]:
        h = completed(t)
        estimate = draw("tree", 0, t - 1)
        replaced = [torch.zeros_like(leaf) for leaf in estimate]
        for level in range(h):
            left = state[level]
            for total, leaf in zip(replaced, left, strict=True):
                total.add_(leaf, alpha=1 / variance_factor(level))
            own = draw("tree", level + 1, (t >> (level + 1)) - 1)
            estimate = [(a + b) / 2 + c for a, b, c in zip(left, estimate, own, strict=True)]
        found = [a / variance_factor(h) - b for a, b in zip(estimate, replaced, strict=True)]
        after = tuple(
            estimate if level == h else [torch.zeros_like(leaf) for leaf in old] if level < h else old
            for level, old in enumerate(state)
        )
        return found, after

    def deviation(self, t: int, rounds: int) -> float:
        h = completed(t)
        if not self.honaker:
            return (1.0 + h) ** 0.5
        whole = sum(2.0 ** (level - h) for level in range(h + 1)) / variance_factor(h) ** 2
        for m in range(h):  # the nodes that are replaced: a left child on every level below h
            share = sum(2.0 ** (level - m) for level in range(m + 1)) / variance_factor(m)
            common = sum(2.0 ** (level - h) for level in range(m + 1)) / variance_factor(h)
            whole += share / variance_factor(m) - 2 * common / variance_factor(m)
        return whole**0.5

    def composition(self, t: int, separation: int | None, rounds: int) -> Composition:
        assert separation is not None
        return Composition(1, squared_sensitivity(t, separation) ** 0.5, sampled=False)


def completed(t: int) -> int:
    """The level of the largest node that round t completes: the number of zeros at the end of t in binary."""
    return (t & -t).bit_length() - 1


def variance_factor(h: int) -> float:
    """2 - 2^-h, the sum of the squared weights of the draws in V(h, j)."""
    return 2 - 2.0**-h


def squared_sensitivity(t: int, separation: int) -> int:
    """The squared sensitivity, over C, of all nodes within rounds 1 ... t: the largest, over the groups of clients that
    take turns, of the sum over nodes of the squared number of the group's rounds in the node."""
    group = np.arange(min(separation, t))[:, None]
    found = np.zeros(len(group), dtype=np.int64)
    for h in range(t.bit_length()):
        begin = np.arange(t >> h) << h
        turns = (begin + (1 << h) - 1 - group) // separation - (begin - 1 - group) // separation
        found += (turns * turns).sum(1)
    return int(found.max())

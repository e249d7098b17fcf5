"""A task's messages, added up as its blocks end."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .forms import Forms
from .sums import At, Fold, Shape

Found = tuple[list[Tensor], dict[str, float]]


class Total:
    """float64 sums of messages: a block's clients in order, blocks in that of the task's tree. `times`: seconds."""

    def __init__(self, forms: Forms, blocks: int) -> None:
        self.fold: Fold[Found] = Fold(Shape([blocks]), self._join)
        self.blocks = 0  # that have ended
        self.spare: list[list[Tensor]] = []  # memory of sums that went into others
        self.shapes = [sample.shape for sample in pytree.tree_leaves(forms.message)]
        self.times: dict[str, float] = dict.fromkeys(("state", "data", "reduce"), 0.0)
        self.clients: dict[str, list[np.ndarray]] = {"loss": [], "norm2": [], "steps": []}
        self._begin_block()

    def _begin_block(self) -> None:
        self.facts: dict[str, float] = dict.fromkeys(("loss", "steps", "gradients", "weight"), 0.0)
        self.leaves: list[Tensor] = []

    def end_block(self) -> None:
        began = time.perf_counter()
        self.fold.put(At(0, self.blocks), (self.leaves, self.facts))
        self.blocks += 1
        self._begin_block()
        self.times["reduce"] += time.perf_counter() - began

    def _join(self, left: Found, right: Found) -> Found:
        for name, value in right[1].items():
            left[1][name] += value
        if right[0]:  # else it has gone there at once
            for a, b in zip(left[0], right[0], strict=True):
                a.add_(b)
            self.spare.append(right[0])
        return left

    def whole(self) -> Found:
        """Once all blocks have ended."""
        return self.fold.whole()

    def _count(self, outcome: Any, steps: np.ndarray, weights: np.ndarray) -> None:
        """steps, weights: (c,)."""
        loss, norm2 = (leaf.reshape(-1).cpu().numpy() for leaf in (outcome.loss, outcome.message.facts["norm2"]))
        taken = int(steps.sum())
        self.facts["loss"] += float(loss.sum())
        self.facts["steps"] += taken
        self.facts["gradients"] += taken * outcome.gradients
        self.facts["weight"] += float(weights.sum())
        for name, values in (("loss", loss), ("norm2", norm2), ("steps", steps)):
            self.clients[name].append(values)

    def add_one(self, outcome: Any, steps: np.ndarray, weights: np.ndarray, only: bool) -> None:
        """steps, weights: (1,). only: the block has no other client."""
        began = time.perf_counter()
        leaves, weight = pytree.tree_leaves(outcome.message), float(weights[0])
        if only and weight == 1:
            self._add_only(leaves)
        else:
            self.leaves = self.leaves or [leaf.zero_() for leaf in self._memory()]
            for i, leaf in enumerate(leaves):
                self.leaves[i].add_(leaf.to(self.leaves[i].device), alpha=weight if i == 0 else 1.0)
        self._count(outcome, steps, weights)
        self.times["reduce"] += time.perf_counter() - began

    def _add_only(self, leaves: list[Tensor]) -> None:
        """Leaves of the message's own shapes, of weight 1: straight to the neighbour's sum where that waits for it.
        Half the memory's work, which large models wait for, and the same bits."""
        if self.blocks % 2:
            for total, leaf in zip(self.fold.parts[At(0, self.blocks - 1)][0], leaves, strict=True):
                total.add_(leaf.to(total.device))
        else:
            self.leaves = [total.copy_(leaf) for total, leaf in zip(self._memory(), leaves, strict=True)]

    def _memory(self) -> list[Tensor]:
        """Of a block's sums, with anything in it."""
        return self.spare.pop() if self.spare else [torch.empty(s, dtype=torch.float64) for s in self.shapes]

    def add_block(self, outcome: Any, steps: np.ndarray, weights: np.ndarray) -> None:
        """All of a block at once."""
        began = time.perf_counter()
        uniform = bool((weights == 1).all())
        for i, leaf in enumerate(pytree.tree_leaves(outcome.message)):
            if i == 0 and not uniform:
                # the first leaf is delta's vector
                total = torch.from_numpy(weights).to(leaf.device) @ leaf.to(torch.float64)
            else:
                total = leaf.sum(0, dtype=torch.float64)
            self.leaves.append(total.cpu())
        self._count(outcome, steps, weights)
        self.times["reduce"] += time.perf_counter() - began

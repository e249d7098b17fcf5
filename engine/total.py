"""A task's messages, added up as its blocks end."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .forms import Forms
from .kernels import FOUR, add_up
from .sums import At, Fold, Shape


Memory = Callable[[Sequence[tuple[int, ...]]], list[Tensor]]
"""shapes -> float64 tensors, with anything in them."""


def empty(shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    return [torch.empty(shape, dtype=torch.float64) for shape in shapes]


class Total:
    """float64 sums of messages: a block's clients in order, blocks in that of the task's tree. `times`: seconds."""

    def __init__(self, forms: Forms, blocks: int, kernels: str = "torch", memory: Memory = empty) -> None:
        """memory: of the first sums; the whole will be there, unless blocks are added up in one go."""
        shape = Shape([blocks])
        self.sums, self.facts = Fold(shape, self._plus), Fold(shape, added)
        self.blocks, self.count, self.kernels = 0, blocks, kernels  # that have ended, and shall
        self.lone: list[list[Tensor]] = []  # messages that are blocks of their own, the last ones, not added up yet
        self.shapes = [tuple(sample.shape) for sample in pytree.tree_leaves(forms.message)]
        self.spare = [memory(self.shapes)]  # of sums that went into others
        self.times: dict[str, float] = dict.fromkeys(("state", "data", "reduce"), 0.0)
        self.clients: dict[str, list[np.ndarray]] = {"loss": [], "norm2": [], "steps": []}
        self._begin_block()

    def _begin_block(self) -> None:
        self.told: dict[str, float] = dict.fromkeys(("loss", "steps", "gradients", "weight"), 0.0)
        self.leaves: list[Tensor] = []

    def end_block(self) -> None:
        began = time.perf_counter()
        self.facts.put(At(0, self.blocks), self.told)
        if self.leaves:
            self._lone_by_themselves()
            self.sums.put(At(0, self.blocks), self.leaves)
        self.blocks += 1
        if len(self.lone) == FOUR or self.blocks == self.count:
            self._four()
        self._begin_block()
        self.times["reduce"] += time.perf_counter() - began

    def _plus(self, left: list[Tensor], right: list[Tensor]) -> list[Tensor]:
        if right:  # else it has gone there at once
            for a, b in zip(left, right, strict=True):
                a.add_(b)
            self.spare.append(right)
        return left

    def whole(self) -> tuple[list[Tensor], dict[str, float]]:
        """Once all blocks have ended."""
        return self.sums.whole(), self.facts.whole()

    # --- lone clients -------------------------------------------------------------------------------------------------
    def _four(self) -> None:
        """Blocks of one client at once, and to their neighbours' sum where that waits for theirs: the same bits for a
        third of the memory's work, which large models wait for."""
        if not self.lone:
            return
        level = min(FOUR.bit_length() - 1, self.sums.shape.root.level)
        at = At(level, (self.blocks - 1) >> level)
        beside = self.sums.parts[At(level, at.place - 1)] if at.place % 2 else None
        total = beside or self._memory()
        for sum_, *parts in zip(total, *self.lone, strict=True):
            add_up(sum_, parts, beside is not None, self.kernels)
        self.lone = []
        self.sums.put(at, [] if beside else total)

    def _lone_by_themselves(self) -> None:
        """Where another kind of block comes between."""
        first = self.blocks - len(self.lone)
        for i, leaves in enumerate(self.lone):
            self.sums.put(At(0, first + i), [s.copy_(leaf) for s, leaf in zip(self._memory(), leaves, strict=True)])
        self.lone = []

    def _count(self, outcome: Any, steps: np.ndarray, weights: np.ndarray) -> None:
        """steps, weights: (c,)."""
        loss, norm2 = (leaf.reshape(-1).cpu().numpy() for leaf in (outcome.loss, outcome.message.facts["norm2"]))
        taken = int(steps.sum())
        self.told["loss"] += float(loss.sum())
        self.told["steps"] += taken
        self.told["gradients"] += taken * outcome.gradients
        self.told["weight"] += float(weights.sum())
        for name, values in (("loss", loss), ("norm2", norm2), ("steps", steps)):
            self.clients[name].append(values)

    def add_one(self, outcome: Any, steps: np.ndarray, weights: np.ndarray, only: bool) -> None:
        """steps, weights: (1,). only: the block has no other client."""
        began = time.perf_counter()
        leaves, weight = pytree.tree_leaves(outcome.message), float(weights[0])
        if only and weight == 1 and len(self.lone) == self.blocks % FOUR:
            self.lone.append(leaves)
        else:
            self.leaves = self.leaves or [leaf.zero_() for leaf in self._memory()]
            for i, leaf in enumerate(leaves):
                self.leaves[i].add_(leaf.to(self.leaves[i].device), alpha=weight if i == 0 else 1.0)
        self._count(outcome, steps, weights)
        self.times["reduce"] += time.perf_counter() - began

    def _memory(self) -> list[Tensor]:
        """Of a block's sums, with anything in it."""
        return self.spare.pop() if self.spare else empty(self.shapes)

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


def added(left: dict[str, float], right: dict[str, float]) -> dict[str, float]:
    return {name: value + right[name] for name, value in left.items()}

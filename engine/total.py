"""A task's messages, added up as its blocks end."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .forms import Forms


class Total:
    """Running float64 sums of messages, in the order of blocks."""

    def __init__(self, forms: Forms) -> None:
        samples = pytree.tree_leaves(forms.message)
        self.leaves = [torch.zeros(sample.shape, dtype=torch.float64) for sample in samples]
        names = ("loss", "steps", "gradients", "weight", "state", "data", "reduce")
        self.facts: dict[str, float] = dict.fromkeys(names, 0.0)
        self.clients: dict[str, list[np.ndarray]] = {"loss": [], "norm2": [], "steps": []}

    def _count(self, outcome: Any, steps: Tensor, weights: Tensor) -> None:
        """steps, weights: (c,)."""
        loss, norm2 = outcome.loss.reshape(-1), outcome.message.facts["norm2"].reshape(-1)
        self.facts["loss"] += float(loss.sum())
        self.facts["steps"] += int(steps.sum())
        self.facts["gradients"] += int(steps.sum()) * outcome.gradients
        self.facts["weight"] += float(weights.sum())
        for name, values in (("loss", loss), ("norm2", norm2), ("steps", steps)):
            self.clients[name].append(values.cpu().numpy())

    def add_one(self, outcome: Any, steps: Tensor, weights: Tensor) -> None:
        """steps, weights: (1,)."""
        began = time.perf_counter()
        for i, leaf in enumerate(pytree.tree_leaves(outcome.message)):
            self.leaves[i].add_(leaf.to(self.leaves[i].device), alpha=float(weights) if i == 0 else 1.0)
        self._count(outcome, steps, weights)
        self.facts["reduce"] += time.perf_counter() - began

    def add_block(self, outcome: Any, steps: Tensor, weights: Tensor) -> None:
        began = time.perf_counter()
        uniform = bool((weights == 1).all())
        for i, leaf in enumerate(pytree.tree_leaves(outcome.message)):
            if i == 0 and not uniform:
                total = weights.to(leaf.device) @ leaf.to(torch.float64)  # the first leaf is delta's vector
            else:
                total = leaf.sum(0, dtype=torch.float64)
            self.leaves[i].add_(total.to(self.leaves[i].device))
        self._count(outcome, steps, weights)
        self.facts["reduce"] += time.perf_counter() - began

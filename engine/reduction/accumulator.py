"""A task's messages, added up as its blocks end."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..kernels.operators import FOUR, add_up
from ..methods.state_spec import StateSpec
from .tree import TreeNode, TreeReducer, TreeShape

Memory = Callable[[Sequence[tuple[int, ...]]], list[Tensor]]
"""shapes -> float64 tensors, with anything in them."""


def empty(shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    return [torch.empty(shape, dtype=torch.float64) for shape in shapes]


FACTS = ("loss", "steps", "gradients", "weight")


class ClientNumbers(NamedTuple):
    """Numbers of c clients that were run at once, or of one alone: of each, on its device until all are asked for."""

    loss: Tensor  # (c,) or ()
    norm2: Tensor
    gradients: int  # a step
    steps: np.ndarray  # (c,)
    weights: np.ndarray


class Accumulator:
    """float64 sums of messages: a block's clients in order, blocks in that of the task's tree. `times`: seconds."""

    def __init__(self, state_spec: StateSpec, blocks: int, kernels: str = "torch", memory: Memory = empty) -> None:
        """memory: of the first sums that need any; the whole comes to lie there where they are block 0's."""
        self.sums = TreeReducer(TreeShape([blocks]), self._plus)
        self.blocks, self.count, self.kernels = 0, blocks, kernels  # that have ended, and shall
        self.lone: list[list[Tensor]] = []  # messages that are blocks of their own, the last ones, not added up yet
        self.shapes = [tuple(sample.shape) for sample in pytree.tree_leaves(state_spec.message)]
        self.weighted = state_spec.weighted  # leaf by leaf: whether it is averaged with the clients' weights
        self.spare = [memory(self.shapes)]  # of sums that went into others
        self.times: dict[str, float] = dict.fromkeys(("state", "data", "reduce"), 0.0)
        self.clients: dict[str, list[np.ndarray]] = {}  # what else there is of each
        self.noted: list[list[ClientNumbers]] = [[]]  # by block
        self.leaves: list[Tensor] = []  # of the block under way

    def end_block(self) -> None:
        began = time.perf_counter()
        if self.leaves:
            self._lone_by_themselves()
            self.sums.put(TreeNode(0, self.blocks), self.leaves)
        self.blocks += 1
        if len(self.lone) == FOUR or self.blocks == self.count:
            self._four()
        self.noted.append([])
        self.leaves = []
        self.times["reduce"] += time.perf_counter() - began

    def _plus(self, left: list[Tensor], right: list[Tensor]) -> list[Tensor]:
        if right:  # else it has gone there at once
            for a, b in zip(left, right, strict=True):
                a.add_(b)
            self.spare.append(right)
        return left

    def whole(self) -> tuple[list[Tensor], dict[str, float], dict[str, np.ndarray]]:
        """(sums, facts, numbers of each client (c,)), once all blocks have ended."""
        began = time.perf_counter()
        noted = [each for block in self.noted for each in block]
        loss, norm2 = (joined([getattr(each, name) for each in noted]) for name in ("loss", "norm2"))
        facts, at = TreeReducer(TreeShape([self.blocks]), added), 0
        for number, block in enumerate(self.noted[:-1]):
            sums = [0.0] * len(FACTS)
            for each in block:
                end, taken = at + len(each.steps), sum(each.steps.tolist())
                more = (summed(loss[at:end]), taken, taken * each.gradients, summed(each.weights))
                sums, at = added(sums, more), end
            facts.put(TreeNode(0, number), sums)
        clients = {name: np.concatenate(parts) for name, parts in self.clients.items()}
        clients |= {"loss": loss, "norm2": norm2, "steps": np.concatenate([each.steps for each in noted])}
        self.times["reduce"] += time.perf_counter() - began
        return self.sums.whole(), dict(zip(FACTS, facts.whole(), strict=True)), clients

    # --- lone clients -------------------------------------------------------------------------------------------------
    def _four(self) -> None:
        """Blocks of one client at once, and to their neighbours' sum where that waits for theirs: the same bits for a
        third of the memory's work, which large models wait for."""
        if not self.lone:
            return
        level = min(FOUR.bit_length() - 1, self.sums.shape.root.level)
        at = TreeNode(level, (self.blocks - 1) >> level)
        beside = self.sums.parts[TreeNode(level, at.place - 1)] if at.place % 2 else None
        total = beside or self._memory()
        for sum_, *parts in zip(total, *self.lone, strict=True):
            add_up(sum_, parts, beside is not None, self.kernels)
        self.lone = []
        self.sums.put(at, [] if beside else total)

    def _lone_by_themselves(self) -> None:
        """Where another kind of block comes between."""
        first = self.blocks - len(self.lone)
        for i, leaves in enumerate(self.lone):
            self.sums.put(
                TreeNode(0, first + i), [s.copy_(leaf) for s, leaf in zip(self._memory(), leaves, strict=True)]
            )
        self.lone = []

    def _note(self, outcome: Any, steps: np.ndarray, weights: np.ndarray) -> None:
        """steps, weights: (c,)."""
        self.noted[-1].append(
            ClientNumbers(outcome.loss, outcome.message.facts["norm2"], outcome.gradients, steps, weights)
        )

    def add_one(self, outcome: Any, steps: np.ndarray, weights: np.ndarray, only: bool) -> None:
        """steps, weights: (1,). only: the block has no other client."""
        began = time.perf_counter()
        leaves, weight = pytree.tree_leaves(outcome.message), float(weights[0])
        if only and weight == 1 and len(self.lone) == self.blocks % FOUR:
            self.lone.append(leaves)
        else:
            self.leaves = self.leaves or [leaf.zero_() for leaf in self._memory()]
            for i, leaf in enumerate(leaves):
                self.leaves[i].add_(leaf.to(self.leaves[i].device), alpha=weight if self.weighted[i] else 1.0)
        self._note(outcome, steps, weights)
        self.times["reduce"] += time.perf_counter() - began

    def _memory(self) -> list[Tensor]:
        """Of a block's sums, with anything in it."""
        return self.spare.pop() if self.spare else empty(self.shapes)

    def add_block(self, outcome: Any, steps: np.ndarray, weights: np.ndarray) -> None:
        """All of a block at once."""
        began = time.perf_counter()
        uniform = bool((weights == 1).all())
        for i, leaf in enumerate(pytree.tree_leaves(outcome.message)):
            if self.weighted[i] and not uniform:
                # One row a client, so that the product is the weighted sum whatever the leaf's own shape is.
                by_client = leaf.to(torch.float64).reshape(len(weights), -1)
                total = (torch.from_numpy(weights).to(leaf.device) @ by_client).view(leaf.shape[1:])
            else:
                total = leaf.sum(0, dtype=torch.float64)
            self.leaves.append(total.cpu())
        self._note(outcome, steps, weights)
        self.times["reduce"] += time.perf_counter() - began


def summed(numbers: np.ndarray) -> float:
    return numbers.item() if len(numbers) == 1 else float(numbers.sum())


def joined(parts: list[Tensor]) -> np.ndarray:
    """(c,), of parts (c,) or ()."""
    return torch.hstack(parts).cpu().numpy()


def added(left: Sequence[float], right: Sequence[float]) -> list[float]:
    return [a + b for a, b in zip(left, right, strict=True)]

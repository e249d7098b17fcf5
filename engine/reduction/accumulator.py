"""Adds up the messages of a task, block by block."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..devices.transfer import to_device, to_host
from ..kernels.operators import AT_ONCE, add_up
from ..methods.state_spec import StateSpec
from .tree import TreeNode, TreeReducer, TreeShape

Allocator = Callable[[Sequence[tuple[int, ...]]], list[Tensor]]
"""shapes -> float64 tensors with arbitrary content."""


CPU = torch.device("cpu")


def empty(shapes: Sequence[tuple[int, ...]], device: torch.device = CPU) -> list[Tensor]:
    return [torch.empty(shape, dtype=torch.float64, device=device) for shape in shapes]


FACTS = ("loss", "steps", "gradients", "weight")


class ClientNumbers(NamedTuple):
    """Numbers of c clients that ran at once, or of one client that ran alone.

    The tensors stay on their device until the numbers of the task are summed.
    """

    loss: Tensor  # (c,) or ()
    norm2: Tensor  # (c,) or ()
    gradients: int  # per local step
    steps: np.ndarray  # (c,)
    weights: np.ndarray  # (c,)
    rms: Tensor | None  # (c,) or (), of the losses of single examples, if the run needs them


class Accumulator:
    """float64 sums of a task's messages: the clients of a block in order, then the blocks in the order of the tree.

    `times`: the seconds that the task spent on state, data and reduce. On a device other than the processor, sums stay
    on the device until the task has ended, and come from there in one transfer.
    """

    def __init__(
        self,
        state_spec: StateSpec,
        blocks: int,
        kernels: str = "torch",
        allocate: Allocator = empty,
        device: torch.device = CPU,
    ) -> None:
        """`blocks`: the number of blocks in the task. `allocate`: provides memory of the processor: there, that of the
        first sum, which holds the sum of the task at the end if it is the sum of block 0; otherwise that of the result.
        `device`: of the messages."""
        self.block_count, self.kernels = blocks, kernels
        self.blocks = 0  # that have ended
        self.lone: list[list[Tensor]] = []  # messages of the last blocks with one client each, not added yet
        self.shapes = [tuple(sample.shape) for sample in pytree.tree_leaves(state_spec.message)]
        self.weighted = state_spec.weighted  # for each leaf: whether it is averaged with the clients' weights
        self.device, self.allocate = device, allocate
        self.spare = [allocate(self.shapes)] if device == CPU else []  # memory of sums that were added to others
        self.sums = TreeReducer(TreeShape([blocks]), partial(add_leaves_in_place, self.spare))
        self.times: dict[str, float] = dict.fromkeys(("state", "data", "reduce"), 0.0)
        self.clients: dict[str, list[np.ndarray]] = {}  # further arrays with one entry per client
        self.noted: list[list[ClientNumbers]] = [[]]  # by block
        self.targets: tuple[int, ...] = ()  # see `AccumulatorByTarget`
        self.leaves: list[Tensor] = []  # sums of the current block

    def end_block(self) -> None:
        """The messages of the current block are complete."""
        began = time.perf_counter()
        if self.leaves or not self.noted[-1]:  # a block without clients keeps its place in the tree
            self._put_lone_blocks()
            self.sums.put(TreeNode(0, self.blocks), self.leaves)
        self.blocks += 1
        if len(self.lone) == AT_ONCE or self.blocks == self.block_count:
            self._add_lone_blocks()
        self.noted.append([])
        self.leaves = []
        self.times["reduce"] += time.perf_counter() - began

    def result(self) -> tuple[list[Tensor], dict[str, float], dict[str, np.ndarray]]:
        """(sums, sums of facts, arrays with one entry per client), once all blocks have ended."""
        began = time.perf_counter()
        noted = [each for block in self.noted for each in block]
        total, loss, norm2 = self._on_host(self.sums.total(), [each.loss for each in noted], [e.norm2 for e in noted])
        facts, begin = TreeReducer(TreeShape([self.blocks]), added), 0
        for number, block in enumerate(self.noted[:-1]):
            sums = [0.0] * len(FACTS)
            for each in block:
                end, steps = begin + len(each.steps), sum(each.steps.tolist())
                more = (summed(loss[begin:end]), steps, steps * each.gradients, summed(each.weights))
                sums, begin = added(sums, more), end
            facts.put(TreeNode(0, number), sums)
        clients = {name: np.concatenate(parts) for name, parts in self.clients.items()}
        clients |= {"loss": loss, "norm2": norm2, "steps": np.concatenate([each.steps for each in noted])}
        if squared := [each.rms for each in noted if each.rms is not None]:
            clients["rms"] = stacked(squared)
        self.times["reduce"] += time.perf_counter() - began
        return total, dict(zip(FACTS, facts.total(), strict=True)), clients

    def _on_host(
        self, total: list[Tensor], loss: list[Tensor], norm2: list[Tensor]
    ) -> tuple[list[Tensor], np.ndarray, np.ndarray]:
        """(sums, losses (c,), squared norms (c,)) in the processor's memory. The processor waits for the device here,
        once per task."""
        if self.device == CPU:
            return total, stacked(loss), stacked(norm2)
        *found, losses, norms2 = to_host([*total, torch.hstack(loss), torch.hstack(norm2)])
        kept = self.allocate(self.shapes) if total else []
        for memory, leaf in zip(kept, found, strict=True):
            memory.copy_(leaf)
        return kept, losses.to(loss[0].dtype).numpy(), norms2.to(norm2[0].dtype).numpy()

    # --- blocks with one client ---------------------------------------------------------------------------------------
    def _add_lone_blocks(self) -> None:
        """Add the messages of up to AT_ONCE blocks with one client each in one pass over the memory.

        If the sum of the neighbour in the tree waits for their sum, they are added to it in the same pass. The bits are
        those of adding one by one, with less memory traffic, which is what limits large models.
        """
        if not self.lone:
            return
        level = min(AT_ONCE.bit_length() - 1, self.sums.shape.root.level)
        at = TreeNode(level, (self.blocks - 1) >> level)
        neighbour = self.sums.parts[TreeNode(level, at.place - 1)] if at.place % 2 else None
        neighbour = neighbour or None  # [] stands for blocks without clients
        total = neighbour or self._memory()
        for leaf, *parts in zip(total, *self.lone, strict=True):
            add_up(leaf, parts, neighbour is not None, self.kernels)
        self.lone = []
        self.sums.put(at, [] if neighbour else total)

    def _put_lone_blocks(self) -> None:
        """Put the messages of blocks with one client into the tree one by one, before a block with more clients."""
        first = self.blocks - len(self.lone)
        for number, leaves in enumerate(self.lone):
            sums = [total.copy_(leaf) for total, leaf in zip(self._memory(), leaves, strict=True)]
            self.sums.put(TreeNode(0, first + number), sums)
        self.lone = []

    def _note(self, outcome: Any, steps: np.ndarray, weights: np.ndarray) -> None:
        """Keep the numbers of c clients for `result`."""
        self.noted[-1].append(numbers_of(outcome, steps, weights))

    def add_one(self, outcome: Any, steps: np.ndarray, weights: np.ndarray, only: bool) -> None:
        """Add the message of one client that ran alone.

        `steps`, `weights`: (1,). `only`: whether the block has no other client.
        """
        began = time.perf_counter()
        leaves, weight = pytree.tree_leaves(outcome.message), float(weights[0])
        if only and weight == 1 and len(self.lone) == self.blocks % AT_ONCE:
            self.lone.append(leaves)
        else:
            self.leaves = self.leaves or [leaf.zero_() for leaf in self._memory()]
            for i, leaf in enumerate(leaves):
                self.leaves[i].add_(leaf.to(self.leaves[i].device), alpha=weight if self.weighted[i] else 1.0)
        self._note(outcome, steps, weights)
        self.times["reduce"] += time.perf_counter() - began

    def _memory(self) -> list[Tensor]:
        """Memory for the sums of a block, with arbitrary content."""
        return self.spare.pop() if self.spare else empty(self.shapes, self.device)

    def add_block(self, outcome: Any, steps: np.ndarray, weights: np.ndarray) -> None:
        """Add the messages of all clients of a block, which ran at once. `steps`, `weights`: (c,)."""
        began = time.perf_counter()
        uniform = bool((weights == 1).all())
        for i, leaf in enumerate(pytree.tree_leaves(outcome.message)):
            if self.weighted[i] and not uniform:
                # A matrix with one row per client: the product is the weighted sum for any shape of the leaf.
                by_client = leaf.to(torch.float64).reshape(len(weights), -1)
                total = (to_device(torch.from_numpy(weights), leaf.device) @ by_client).view(leaf.shape[1:])
            else:
                total = leaf.sum(0, dtype=torch.float64)
            self.leaves.append(total)
        self._note(outcome, steps, weights)
        self.times["reduce"] += time.perf_counter() - began


class AccumulatorByTarget(Accumulator):
    """The same for one block of an asynchronous run, whose clients' messages belong to several updates of the server:
    a sum for each of them.

    Each sum is made as if the other clients of the block were not there, so that a block whose clients all belong to
    one update has the sum of a synchronous round.
    """

    def __init__(
        self,
        state_spec: StateSpec,
        targets: np.ndarray,
        kernels: str = "torch",
        allocate: Allocator = empty,
        device: torch.device = CPU,
    ) -> None:
        """targets: (c,) the number of the update for each client; nobody needs the message where it is negative."""
        self.of_client, self.place = targets, 0  # place: of the next client that ran alone
        self.targets = tuple(np.unique(targets[targets >= 0]).tolist())
        shapes = [tuple(sample.shape) for sample in pytree.tree_leaves(state_spec.message)]
        memory = allocate(shapes * max(1, len(self.targets)))
        count = len(shapes)
        parts = {target: memory[i * count : (i + 1) * count] for i, target in enumerate(self.targets)}
        self.parts = {
            target: Accumulator(state_spec, 1, kernels, lambda _, own=own: own, device) for target, own in parts.items()
        }
        self.times = dict.fromkeys(("state", "data", "reduce"), 0.0)
        self.clients: dict[str, list[np.ndarray]] = {}
        self.numbers: list[ClientNumbers] = []

    def add_one(self, outcome: Any, steps: np.ndarray, weights: np.ndarray, only: bool) -> None:
        target = int(self.of_client[self.place])
        self.place += 1
        self.numbers.append(numbers_of(outcome, steps, weights))
        if target in self.parts:
            only = only or int((self.of_client == target).sum()) == 1
            self.parts[target].add_one(outcome, steps, weights, only)

    def add_block(self, outcome: Any, steps: np.ndarray, weights: np.ndarray) -> None:
        self.numbers.append(numbers_of(outcome, steps, weights))
        for target, part in self.parts.items():
            those = np.flatnonzero(self.of_client == target)
            own = outcome
            if len(those) < len(weights):
                chosen = to_device(torch.from_numpy(those), outcome.loss.device)
                message = pytree.tree_map(lambda leaf, chosen=chosen: leaf[chosen], outcome.message)
                own = outcome._replace(message=message, loss=outcome.loss[chosen])
            part.add_block(own, steps[those], weights[those])

    def end_block(self) -> None:
        for part in self.parts.values():
            part.end_block()

    def result(self) -> tuple[list[Tensor], dict[str, float], dict[str, np.ndarray]]:
        """(sums of one target after another, sums of facts by NAME/TARGET, arrays with one entry per client)."""
        leaves: list[Tensor] = []
        facts: dict[str, float] = {}
        for target, part in self.parts.items():
            own, numbers, _ = part.result()
            leaves += own
            facts |= {f"{name}/{target}": value for name, value in numbers.items()}
            for name, seconds in part.times.items():
                self.times[name] += seconds
        clients = {name: np.concatenate(parts) for name, parts in self.clients.items()}
        clients |= {name: stacked([getattr(each, name) for each in self.numbers]) for name in ("loss", "norm2")}
        clients["steps"] = np.concatenate([each.steps for each in self.numbers])
        return leaves, {**facts, "steps": float(clients["steps"].sum())}, clients


def numbers_of(outcome: Any, steps: np.ndarray, weights: np.ndarray) -> ClientNumbers:
    """The numbers of c clients for the results of a task."""
    return ClientNumbers(outcome.loss, outcome.message.facts["norm2"], outcome.gradients, steps, weights, outcome.rms)


def summed(numbers: np.ndarray) -> float:
    """The sum of an array (c,)."""
    return numbers.item() if len(numbers) == 1 else float(numbers.sum())


def stacked(parts: list[Tensor]) -> np.ndarray:
    """(c,): parts of shape (c,) or () one after the other."""
    return torch.hstack(parts).cpu().numpy()


def added(left: Sequence[float], right: Sequence[float]) -> list[float]:
    """The sums of two lists of numbers, one by one."""
    return [a + b for a, b in zip(left, right, strict=True)]


def add_leaves_in_place(spare: list[list[Tensor]], left: list[Tensor], right: list[Tensor]) -> list[Tensor]:
    """The sums of two lists of tensors, in the memory of the left one. Either may be empty. spare: takes the right one,
    whose memory can be used again.

    It is no method, because a reducer with a method of its own accumulator would keep the worker's data in memory until
    Python's garbage collector runs.
    """
    if not left:  # blocks without clients
        return right
    if right:  # it is empty if the lone blocks have already been added to the left one
        for a, b in zip(left, right, strict=True):
            a.add_(b)
        spare.append(right)
    return left

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

from ..accelerators.transfer import to_device, to_host
from ..kernels.operators import AT_ONCE, add_up
from ..method_form.state_spec import StateSpec
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
        self.targets: tuple[tuple[int, int], ...] = ()  # see `AccumulatorByTarget`
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
        self.leaves += block_sums(pytree.tree_leaves(outcome.message), weights, self.weighted)
        self._note(outcome, steps, weights)
        self.times["reduce"] += time.perf_counter() - began


class AccumulatorByTarget:
    """float64 sums of the messages of a task of an asynchronous run: for each block one for every update of the server
    that uses messages of its clients.

    Each sum is made as if the other clients of the block were not there, so that a block whose clients all belong to
    one update has the sum of a synchronous round. It is used as an `Accumulator`.
    """

    def __init__(
        self,
        state_spec: StateSpec,
        of_client: np.ndarray,
        cuts: Sequence[int],
        allocate: Allocator = empty,
        device: torch.device = CPU,
    ) -> None:
        """of_client: (c,) the number of the update for each client; nobody needs the message where it is negative.
        cuts: the ends of the blocks. allocate: provides memory of the processor for all sums."""
        self.of_client, self.device, self.allocate = of_client, device, allocate
        self.block, self.place = 0, 0  # of the next client
        self.shapes, self.weighted = state_spec.shapes, state_spec.weighted
        targets: list[tuple[int, int]] = []
        for block, (begin, end) in enumerate(zip((0, *cuts), cuts, strict=False)):
            targets += [(block, target) for target in sorted({*of_client[begin:end].tolist()}) if target >= 0]
        self.targets = tuple(targets)  # (block, update) of each sum
        self.sums: dict[tuple[int, int], list[Tensor]] = {}
        self.memory: dict[tuple[int, int], list[Tensor]] = {}
        if device == CPU:
            memory, count = allocate(self.shapes * len(targets)), len(self.shapes)
            self.memory = {each: memory[i * count : (i + 1) * count] for i, each in enumerate(targets)}
        self.times: dict[str, float] = dict.fromkeys(("state", "data", "reduce"), 0.0)
        self.clients: dict[str, list[np.ndarray]] = {}
        self.numbers: list[ClientNumbers] = []
        self.parts: dict[tuple[int, int], list[tuple[np.ndarray, int]]] = {each: [] for each in targets}
        """The clients of each sum as they were added: (their places in the task, their gradients per local step)."""

    def add_one(self, outcome: Any, steps: np.ndarray, weights: np.ndarray, only: bool) -> None:
        """Add the message of one client that ran alone, see `Accumulator`."""
        began = time.perf_counter()
        target, place = (self.block, int(self.of_client[self.place])), np.array([self.place])
        self.numbers.append(numbers_of(outcome, steps, weights))
        self.place += 1
        if target in self.parts:
            self.parts[target].append((place, outcome.gradients))
            first = target not in self.sums
            if first:
                self.sums[target] = self.memory[target] if self.memory else empty(self.shapes, self.device)
            leaves = pytree.tree_leaves(outcome.message)
            for total, leaf, weighted in zip(self.sums[target], leaves, self.weighted, strict=True):
                factor = float(weights[0]) if weighted else 1.0
                if first:
                    total.copy_(leaf)
                    if factor != 1:
                        total.mul_(factor)
                else:
                    total.add_(leaf.to(total.device), alpha=factor)
        self.times["reduce"] += time.perf_counter() - began

    def add_block(self, outcome: Any, steps: np.ndarray, weights: np.ndarray) -> None:
        """Add the messages of all clients of a block, which ran at once. steps, weights: (c,)."""
        began, of_client = time.perf_counter(), self.of_client[self.place : self.place + len(weights)]
        self.numbers.append(numbers_of(outcome, steps, weights))
        leaves = pytree.tree_leaves(outcome.message)
        for target in [target for target in self.parts if target[0] == self.block]:
            those, own = np.flatnonzero(of_client == target[1]), leaves
            if len(those) < len(weights):
                chosen = to_device(torch.from_numpy(those), outcome.loss.device)
                own = [leaf[chosen] for leaf in leaves]
            self.sums[target] = block_sums(own, weights[those], self.weighted)
            self.parts[target].append((self.place + those, outcome.gradients))
        self.place += len(weights)
        self.times["reduce"] += time.perf_counter() - began

    def end_block(self) -> None:
        self.block += 1

    def result(self) -> tuple[list[Tensor], dict[str, float], dict[str, np.ndarray]]:
        """(the sums of one target after another, sums of facts by NAME/BLOCK/UPDATE, arrays with one entry per client).
        On a device other than the processor, all come from there in one transfer."""
        began = time.perf_counter()
        leaves = [leaf for target in self.targets for leaf in self.sums[target]]
        loss, norm2 = (torch.hstack([getattr(each, name) for each in self.numbers]) for name in ("loss", "norm2"))
        if self.device != CPU:
            *found, losses, norms = to_host([*leaves, loss, norm2])
            leaves = self.allocate(self.shapes * len(self.targets))
            for memory, leaf in zip(leaves, found, strict=True):
                memory.copy_(leaf)
            loss, norm2 = losses.to(loss.dtype), norms.to(norm2.dtype)
        clients = {name: np.concatenate(parts) for name, parts in self.clients.items()}
        clients |= {"loss": loss.numpy(), "norm2": norm2.numpy()}
        clients["steps"] = np.concatenate([each.steps for each in self.numbers])
        weights = np.concatenate([each.weights for each in self.numbers])
        facts = {"steps": float(clients["steps"].sum())}
        for (block, update), parts in self.parts.items():
            sums = [0.0] * len(FACTS)
            for places, gradients in parts:
                steps = int(clients["steps"][places].sum())
                more = (summed(clients["loss"][places]), steps, steps * gradients, summed(weights[places]))
                sums = added(sums, more)
            facts |= {f"{name}/{block}/{update}": number for name, number in zip(FACTS, sums, strict=True)}
        self.times["reduce"] += time.perf_counter() - began
        return leaves, facts, clients


def block_sums(leaves: Sequence[Tensor], weights: np.ndarray, weighted: Sequence[bool]) -> list[Tensor]:
    """The sums of the messages of c clients that ran at once. leaves: of all messages, the clients' axis first.
    weights: (c,), for the leaves that are `weighted`."""
    uniform, totals = bool((weights == 1).all()), []
    for leaf, by_weight in zip(leaves, weighted, strict=True):
        if by_weight and not uniform:
            # A matrix with one row per client: the product is the weighted sum for any shape of the leaf.
            by_client = leaf.to(torch.float64).reshape(len(weights), -1)
            totals.append((to_device(torch.from_numpy(weights), leaf.device) @ by_client).view(leaf.shape[1:]))
        else:
            totals.append(leaf.sum(0, dtype=torch.float64))
    return totals


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

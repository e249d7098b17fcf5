"""Adds up the messages of a task, block by block."""

from __future__ import annotations

import time
from collections.abc import Sequence
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

CPU = torch.device("cpu")


def empty(shapes: Sequence[tuple[int, ...]], device: torch.device = CPU) -> list[Tensor]:
    """Memory for sums, float64 with arbitrary content."""
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


Part = tuple[slice | np.ndarray, int]
"""(the positions in the task of clients that were added to a sum, their gradients per local step)."""


class Accumulator:
    """float64 sums of a task's messages, one for each update of the server that uses them.

    The clients of a block are added in order. If one update uses all messages, as in a synchronous round, the blocks
    are added in the order of the tree. Otherwise every block has a sum for each update, made as if the other clients of
    the block were not there: its neighbours in the tree are often for other updates.

    `times`: the seconds that the task spent on state, data and reduce. On a device other than the processor, sums stay
    on the device until the task has ended, and come from there in one transfer.
    """

    def __init__(
        self,
        state_spec: StateSpec,
        cuts: Sequence[int],
        updates: np.ndarray | None = None,
        compiled: bool = False,
        device: torch.device = CPU,
    ) -> None:
        """cuts: the ends of the blocks. updates: (c,) the number of the update that uses each client's message,
        negative where none does; None where one update uses all of them. compiled: whether the compiled library adds.
        device: of the messages."""
        self.updates, self.compiled, self.device = updates, compiled, device
        self.shapes = [tuple(sample.shape) for sample in pytree.tree_leaves(state_spec.message)]
        self.weighted = state_spec.weighted  # for each leaf: whether it is averaged with the clients' weights
        self.block_count, self.block, self.place = len(cuts), 0, 0  # the current block, the next client
        self.targets = (
            () if updates is None else targets_of(updates, cuts)
        )  # (block, update) of the sums that stay apart
        self.apart: dict[tuple[int, int], list[Tensor]] = {}  # target -> its sum, or memory for it
        self.spare: list[list[Tensor]] = []  # memory, also that of sums that were added to others
        if device == CPU and updates is None:
            self.spare = [empty(self.shapes)]
        elif device == CPU:
            memory, count = empty(self.shapes * len(self.targets)), len(self.shapes)
            self.apart = {each: memory[i * count : (i + 1) * count] for i, each in enumerate(self.targets)}
        self.joined = TreeReducer(TreeShape([len(cuts)]), partial(add_leaves_in_place, self.spare))
        self.lone: list[list[Tensor]] = []  # messages of the last blocks with one client each, not added yet
        self.leaves: dict[int, list[Tensor]] = {}  # update -> sum of the current block; 0 for the only update
        self.parts: dict[tuple[int, int], list[Part]] = {}  # (block, update) -> what was added, in order
        self.times: dict[str, float] = dict.fromkeys(("state", "data", "reduce"), 0.0)
        self.clients: dict[str, list[np.ndarray]] = {}  # further arrays with one entry per client
        self.noted: list[ClientNumbers] = []

    # --- blocks -------------------------------------------------------------------------------------------------------
    def add_block(self, outcome: Any, steps: np.ndarray, weights: np.ndarray) -> None:
        """Add the messages of all clients of a block, which ran at once. steps, weights: (c,)."""
        began, leaves = time.perf_counter(), pytree.tree_leaves(outcome.message)
        for update, those in self._note(outcome, steps, weights):
            if those is None:
                self.leaves[update] = block_sums(leaves, weights, self.weighted)
            else:
                chosen = to_device(torch.from_numpy(those), outcome.loss.device)
                self.leaves[update] = block_sums([leaf[chosen] for leaf in leaves], weights[those], self.weighted)
        self.times["reduce"] += time.perf_counter() - began

    def add_one(self, outcome: Any, steps: np.ndarray, weights: np.ndarray, only: bool) -> None:
        """Add the message of one client that ran alone. steps, weights: (1,). only: whether the block has no other."""
        began, leaves, weight = time.perf_counter(), pytree.tree_leaves(outcome.message), float(weights[0])
        for update, _ in self._note(outcome, steps, weights):
            alone = only and weight == 1 and self.updates is None
            if alone and len(self.lone) == self.block % AT_ONCE:
                self.lone.append(leaves)
            else:
                self._add_message(update, leaves, weight)
        self.times["reduce"] += time.perf_counter() - began

    def _note(self, outcome: Any, steps: np.ndarray, weights: np.ndarray) -> list[tuple[int, np.ndarray | None]]:
        """Keep the numbers of the next c clients for `result`. Returns the updates that use their messages, with the
        positions of each update's clients among them, None for all."""
        self.noted.append(numbers_of(outcome, steps, weights))
        begin, end = self.place, self.place + len(weights)
        self.place = end
        if self.updates is None:
            self.parts.setdefault((self.block, 0), []).append((slice(begin, end), outcome.gradients))
            return [(0, None)]
        found, updates = list[tuple[int, np.ndarray | None]](), self.updates[begin:end]
        for update in sorted({*updates.tolist()}):
            if update >= 0:
                those = np.flatnonzero(updates == update)
                self.parts.setdefault((self.block, update), []).append((begin + those, outcome.gradients))
                found.append((update, those if len(those) < len(updates) else None))
        return found

    def _add_message(self, update: int, leaves: list[Tensor], weight: float) -> None:
        """Add the message of one client to the sum of the current block."""
        first = update not in self.leaves
        if first:
            self.leaves[update] = self.apart.get((self.block, update)) or self._memory()
        for total, leaf, weighted in zip(self.leaves[update], leaves, self.weighted, strict=True):
            factor = weight if weighted else 1.0
            if not first:
                total.add_(leaf.to(total.device), alpha=factor)
            elif factor == 1:
                total.copy_(leaf)
            else:
                total.copy_(leaf).mul_(factor)

    def _memory(self) -> list[Tensor]:
        """Memory for the sums of a block, with arbitrary content."""
        return self.spare.pop() if self.spare else empty(self.shapes, self.device)

    def end_block(self) -> None:
        """The messages of the current block are complete."""
        began = time.perf_counter()
        if self.updates is not None:
            self.apart |= {(self.block, update): leaves for update, leaves in self.leaves.items()}
        elif self.leaves or (self.block, 0) not in self.parts:  # a block without clients keeps its place in the tree
            self._put_lone_blocks()
            self.joined.put(TreeNode(0, self.block), self.leaves.get(0, []))
        self.block += 1
        if len(self.lone) == AT_ONCE or self.block == self.block_count:
            self._add_lone_blocks()
        self.leaves = {}
        self.times["reduce"] += time.perf_counter() - began

    # --- blocks with one client ---------------------------------------------------------------------------------------
    def _add_lone_blocks(self) -> None:
        """Add the messages of up to AT_ONCE blocks with one client each in one pass over the memory.

        If the sum of the neighbour in the tree waits for their sum, they are added to it in the same pass. The bits are
        those of adding one by one, with less memory traffic, which is what limits large models.
        """
        if not self.lone:
            return
        level = min(AT_ONCE.bit_length() - 1, self.joined.shape.root.level)
        at = TreeNode(level, (self.block - 1) >> level)
        neighbour = self.joined.parts[TreeNode(level, at.place - 1)] if at.place % 2 else None
        neighbour = neighbour or None  # [] stands for blocks without clients
        total = neighbour or self._memory()
        for leaf, *parts in zip(total, *self.lone, strict=True):
            add_up(leaf, parts, neighbour is not None, self.compiled)
        self.lone = []
        self.joined.put(at, [] if neighbour else total)

    def _put_lone_blocks(self) -> None:
        """Put the messages of blocks with one client into the tree one by one, before a block with more clients."""
        first = self.block - len(self.lone)
        for number, leaves in enumerate(self.lone):
            sums = [total.copy_(leaf) for total, leaf in zip(self._memory(), leaves, strict=True)]
            self.joined.put(TreeNode(0, first + number), sums)
        self.lone = []

    # --- the result ---------------------------------------------------------------------------------------------------
    def result(self) -> tuple[list[Tensor], dict[str, float], dict[str, np.ndarray]]:
        """(sums, sums of facts, arrays with one entry per client), once all blocks have ended. If there are targets,
        the sums are one target after another, and those of facts are called NAME/BLOCK/UPDATE."""
        began = time.perf_counter()
        if self.updates is None:
            found = self.joined.total()
        else:
            found = [leaf for target in self.targets for leaf in self.apart[target]]
        leaves, loss, norm2 = self._on_host(found)
        clients = {name: np.concatenate(parts) for name, parts in self.clients.items()}
        clients |= {"loss": loss, "norm2": norm2, "steps": np.concatenate([each.steps for each in self.noted])}
        if squared := [each.rms for each in self.noted if each.rms is not None]:
            clients["rms"] = stacked(squared)
        facts = self._facts(loss, clients["steps"], np.concatenate([each.weights for each in self.noted]))
        self.times["reduce"] += time.perf_counter() - began
        return leaves, facts, clients

    def _on_host(self, sums: list[Tensor]) -> tuple[list[Tensor], np.ndarray, np.ndarray]:
        """(sums, losses (c,), squared norms (c,)) in the processor's memory. The processor waits for the device here,
        once per task."""
        loss, norm2 = [each.loss for each in self.noted], [each.norm2 for each in self.noted]
        if self.device == CPU:
            return sums, stacked(loss), stacked(norm2)
        *found, losses, norms2 = to_host([*sums, torch.hstack(loss), torch.hstack(norm2)])
        return found, losses.to(loss[0].dtype).numpy(), norms2.to(norm2[0].dtype).numpy()

    def _facts(self, loss: np.ndarray, steps: np.ndarray, weights: np.ndarray) -> dict[str, float]:
        """The sums of FACTS, see `result`. All arrays: (c,), of the task's clients."""

        def of_sum(target: tuple[int, int]) -> list[float]:
            sums = [0.0] * len(FACTS)
            for those, gradients in self.parts.get(target, ()):
                taken = sum(steps[those].tolist())
                sums = added(sums, (summed(loss[those]), taken, taken * gradients, summed(weights[those])))
            return sums

        if self.updates is not None:
            named = {
                f"{name}/{block}/{update}": number
                for block, update in self.targets
                for name, number in zip(FACTS, of_sum((block, update)), strict=True)
            }
            return {"steps": float(steps.sum()), **named}
        joined = TreeReducer(TreeShape([self.block_count]), added)
        for block in range(self.block_count):
            joined.put(TreeNode(0, block), of_sum((block, 0)))
        return dict(zip(FACTS, joined.total(), strict=True))


def targets_of(updates: np.ndarray, cuts: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """(block, update) for every update that uses messages of a block. updates: (c,), negative for none. cuts: the ends
    of the blocks."""
    blocks = enumerate(zip((0, *cuts), cuts, strict=False))
    return tuple(
        (block, update)
        for block, (begin, end) in blocks
        for update in sorted({*updates[begin:end].tolist()})
        if update >= 0
    )


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

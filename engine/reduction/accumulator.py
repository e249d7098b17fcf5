"""Adds up the messages of a task, block by block."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..accelerators.transfer import to_device, to_host
from ..kernels.operators import AT_ONCE, add_up
from ..method_form.state_spec import StateSpec
from .tree import FACTS, Leaves, Sums, Target, TreeNode, TreeReducer, TreeShape

CPU = torch.device("cpu")


def empty(shapes: Sequence[tuple[int, ...]], device: torch.device = CPU) -> list[Tensor]:
    """Memory for sums, float64 with arbitrary content."""
    return [torch.empty(shape, dtype=torch.float64, device=device) for shape in shapes]


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


class BlockTree:
    """Adds the sums of a task's blocks in the order of the tree, one block after another.

    The messages of AT_ONCE neighbouring blocks with one client each wait for each other and are added in one pass over
    the memory, which is what limits large models. For AT_ONCE = 4, let the blocks 4 to 7 have the messages a, b, c and
    d. Their sum is that of the node (2, 1), and the sum of its neighbour (2, 0), which are the blocks 0 to 3, is there
    already. The pass adds (a + b) + (c + d) to it. These are the bits of adding one by one, in the order of the tree.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], blocks: int, compiled: bool, device: torch.device) -> None:
        """shapes: of the leaves of a message. blocks: their number. compiled, device: see `Accumulator`."""
        self.shapes, self.blocks, self.compiled, self.device = shapes, blocks, compiled, device
        self.spare = [empty(shapes)] if device == CPU else []  # memory, also that of sums that were added to others
        self.sums = TreeReducer(TreeShape([blocks]), partial(add_leaves_in_place, self.spare))
        self.ended = 0  # the number of blocks that have ended
        self.waiting: list[list[Tensor]] = []  # the messages of the last blocks, which have one client each

    def memory(self) -> list[Tensor]:
        """Memory for the sum of a block, with arbitrary content."""
        return self.spare.pop() if self.spare else empty(self.shapes, self.device)

    def keep(self, message: list[Tensor]) -> bool:
        """Let the message of the current block wait, which is the only one of the block. Returns False if it cannot
        wait, because the blocks before it, since the last multiple of AT_ONCE, do not all wait."""
        if len(self.waiting) < self.ended % AT_ONCE:
            return False
        self.waiting.append(message)
        return True

    def end_block(self, total: list[Tensor]) -> None:
        """The current block has ended. total: its sum, [] without clients, or if its message waits."""
        waits = len(self.waiting) > self.ended % AT_ONCE
        if not waits:
            self._add_one_by_one()
            self.sums.put(TreeNode(0, self.ended), total)
        self.ended += 1
        if len(self.waiting) == AT_ONCE or self.ended == self.blocks:
            self._add_at_once()

    def _add_one_by_one(self) -> None:
        """Put the messages that wait into the tree, because the next block has more clients than one, or none."""
        first = self.ended - len(self.waiting)
        for number, leaves in enumerate(self.waiting, first):
            total = [total.copy_(leaf) for total, leaf in zip(self.memory(), leaves, strict=True)]
            self.sums.put(TreeNode(0, number), total)
        self.waiting = []

    def _add_at_once(self) -> None:
        """Add the messages that wait, and the sum of the neighbour in the tree if it waits for theirs."""
        if not self.waiting:
            return
        level = min(AT_ONCE.bit_length() - 1, self.sums.shape.root.level)
        at = TreeNode(level, (self.ended - 1) >> level)
        neighbour = self.sums.parts[TreeNode(level, at.place - 1)] if at.place % 2 else []  # [] also without clients
        total = neighbour or self.memory()
        for leaf, *parts in zip(total, *self.waiting, strict=True):
            add_up(leaf, parts, bool(neighbour), self.compiled)
        self.waiting = []
        self.sums.put(at, [] if neighbour else total)


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
        updates: np.ndarray | int = 0,
        compiled: bool = False,
        device: torch.device = CPU,
    ) -> None:
        """cuts: the ends of the blocks. updates: see `TrainingTask.updates`. compiled: whether the compiled library
        adds. device: of the messages."""
        self.updates, self.device = updates, device
        self.shapes = [tuple(sample.shape) for sample in pytree.tree_leaves(state_spec.message)]
        self.weighted = state_spec.weighted  # for each leaf: whether it is averaged with the clients' weights
        self.block, self.place = 0, 0  # the current block, the next client
        self.tree = BlockTree(self.shapes, len(cuts), compiled, device) if isinstance(updates, int) else None
        self.apart: dict[Target, list[Tensor]] = {}  # the sums of the blocks that have ended, if there is no tree
        self.leaves: dict[int, list[Tensor]] = {}  # update -> sum of the current block
        self.parts: dict[Target, list[Part]] = {}  # what was added for each target, in order
        self.times: dict[str, float] = dict.fromkeys(("state", "data", "reduce"), 0.0)
        self.clients: dict[str, list[np.ndarray]] = {}  # further arrays with one entry per client
        self.noted: list[ClientNumbers] = []
        self.sent: Callable[[], list[Tensor]] | None = None  # see `send`

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
            if not (only and weight == 1 and self.tree is not None and self.tree.keep(leaves)):
                self._add_message(update, leaves, weight)
        self.times["reduce"] += time.perf_counter() - began

    def _note(self, outcome: Any, steps: np.ndarray, weights: np.ndarray) -> list[tuple[int, np.ndarray | None]]:
        """Keep the numbers of the next c clients for `result`. Returns the updates that use their messages, with the
        positions of each update's clients among them, None for all."""
        self.noted.append(numbers_of(outcome, steps, weights))
        begin, end = self.place, self.place + len(weights)
        self.place = end
        if isinstance(self.updates, int):
            self.parts.setdefault((self.block, self.updates), []).append((slice(begin, end), outcome.gradients))
            return [(self.updates, None)]
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
            self.leaves[update] = empty(self.shapes, self.device) if self.tree is None else self.tree.memory()
        for total, leaf, weighted in zip(self.leaves[update], leaves, self.weighted, strict=True):
            factor = weight if weighted else 1.0
            if not first:
                total.add_(leaf.to(total.device), alpha=factor)
            elif factor == 1:
                total.copy_(leaf)
            else:
                total.copy_(leaf).mul_(factor)

    def end_block(self) -> None:
        """The messages of the current block are complete."""
        began = time.perf_counter()
        of_targets = {(self.block, update): leaves for update, leaves in self.leaves.items()}
        if self.tree is None:
            self.apart |= of_targets
        else:
            self.tree.end_block(next(iter(of_targets.values()), []))
        self.block += 1
        self.leaves = {}
        self.times["reduce"] += time.perf_counter() - began

    # --- the result ---------------------------------------------------------------------------------------------------
    def send(self) -> None:
        """Begin to copy all sums and numbers to the processor's memory, once all blocks have ended. It is for devices,
        which compute other tasks until `result` is asked for."""
        if self.device != CPU:
            found = [leaf for each in self._sums() for leaf in each]
            loss, norm2 = [each.loss for each in self.noted], [each.norm2 for each in self.noted]
            self.sent = to_host([*found, torch.hstack(loss), torch.hstack(norm2)], self.device)

    def result(self) -> tuple[Sums, dict[Target, Sums], dict[str, np.ndarray]]:
        """(the sums of all clients; the sums for each target, where there are several updates, and the former are
        empty; arrays with one entry per client), once all blocks have ended."""
        began = time.perf_counter()
        leaves, loss, norm2 = self._on_host()
        clients = {name: np.concatenate(parts) for name, parts in self.clients.items()}
        clients |= {"loss": loss, "norm2": norm2, "steps": np.concatenate([each.steps for each in self.noted])}
        if squared := [each.rms for each in self.noted if each.rms is not None]:
            clients["rms"] = stacked(squared)
        facts = partial(self._facts, loss, clients["steps"], np.concatenate([each.weights for each in self.noted]))
        total, apart, rest = Sums([], {}), dict[Target, Sums](), iter(leaves)
        if self.tree is not None:
            assert isinstance(self.updates, int)
            joined = TreeReducer(self.tree.sums.shape, added)
            for block in range(self.block):
                joined.put(TreeNode(0, block), facts((block, self.updates)))
            total = Sums(leaves, dict(zip(FACTS, joined.total(), strict=True)))
        for target in self.apart:
            apart[target] = Sums([*islice(rest, len(self.shapes))], dict(zip(FACTS, facts(target), strict=True)))
        self.times["reduce"] += time.perf_counter() - began
        return total, apart, clients

    def _facts(self, loss: np.ndarray, steps: np.ndarray, weights: np.ndarray, target: Target) -> list[float]:
        """The sums of FACTS for a target. loss, steps, weights: (c,), of the task's clients."""
        sums = [0.0] * len(FACTS)
        for those, gradients in self.parts.get(target, ()):
            taken = sum(steps[those].tolist())
            sums = added(sums, (summed(loss[those]), taken, taken * gradients, summed(weights[those])))
        return sums

    def _sums(self) -> list[list[Tensor]]:
        """The leaves of the sum of all clients, or of those for each target."""
        return [*self.apart.values()] if self.tree is None else [self.tree.sums.total()]

    def _on_host(self) -> tuple[Leaves, np.ndarray, np.ndarray]:
        """(sums, losses (c,), squared norms (c,)) in the processor's memory. The processor waits for the device here,
        once per task."""
        loss, norm2 = [each.loss for each in self.noted], [each.norm2 for each in self.noted]
        if self.device == CPU:
            return [leaf.numpy() for each in self._sums() for leaf in each], stacked(loss), stacked(norm2)
        if self.sent is None:
            self.send()
        assert self.sent is not None
        *found, losses, norms2 = self.sent()
        return (
            [leaf.numpy() for leaf in found],
            losses.to(loss[0].dtype).numpy(),
            norms2.to(norm2[0].dtype).numpy(),
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
    if right:  # it is empty if its messages have already been added to the left one
        for a, b in zip(left, right, strict=True):
            a.add_(b)
        spare.append(right)
    return left

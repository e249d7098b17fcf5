"""Trains the clients of several runs at once: runs of one process that differ in numbers, seeds or data.

Such runs are called members. The clients of their blocks lie one after another along the clients' axis of one larger
block. There the public state has that axis too, since every member has its own, and so have the numbers in which the
members' methods differ. Everything else is as in a run alone: each member has its own batches and adds up its own
messages, block by block. So the arithmetic of a client and the order of all sums are those of the run alone.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap
from torch.utils import _pytree as pytree

from ..accelerators.transfer import to_device
from ..cohorts.tasks import Broadcast, TrainingTask
from ..method_form.numbers import Path, differing, form, identity, numbers, with_numbers
from ..reduction.tree import TaskResult
from ..storage.sha256 import sha256_of_tensors
from .batches import BlockForm
from .evaluation import ClientGroup, TestSlice
from .local_training import Batch, BatchOracle, BlockBatches, Gradient, LocalResult, LocalTrainer
from .worker import TaskUnderWay, Worker

MOST_NUMBERS = 1 << 18
"""The largest product of the clients in a block of several members and the parameters of their model, so that a vector
of all of them stays in the cache of a processor."""
MOST_TRAINERS = 8
"""How many trainers of members are kept."""


class Part(NamedTuple):
    """A task of one member."""

    worker: Worker
    under_way: TaskUnderWay

    @property
    def blocks(self) -> Iterator[tuple[Part, slice]]:
        return ((self, block) for block in self.under_way.blocks())


def can_be_joined(worker: Worker, tasks: Sequence[TrainingTask]) -> bool:
    """Whether tasks may be trained together with those of other members: clients run at once, in blocks of two or more.
    A client that is alone in its block runs without vmap, and other kernels add up its message."""
    if not worker.vectorise or worker.kernels.recorder(worker.proofs) is not None:
        return False
    plain = all(task.targets is None and not task.warm_start for task in tasks)
    return plain and all(int(np.diff((0, *task.cuts)).min()) > 1 for task in tasks)


def common_form(part: Part) -> Hashable:
    """What parts must have in common to be trained together."""
    batches = part.under_way.batches
    columns = tuple((name, column.dtype, column.shape[1:]) for name, column in batches.columns.items())
    return (taken_apart(part.under_way.trainer).form, columns)


class TakenApart(NamedTuple):
    """What a trainer does, as far as members must have it in common, and the numbers of its method."""

    form: Hashable
    numbers: dict[Path, float]


KNOWN: WeakKeyDictionary[LocalTrainer, TakenApart] = WeakKeyDictionary()
"""What trainers do that have been asked for: it takes as long to find out as a short local step."""


def taken_apart(trainer: LocalTrainer) -> TakenApart:
    if trainer not in KNOWN:
        workload = identity(trainer.workload, without=("partition",))
        how = (
            trainer.kernels,
            trainer.precision,
            trainer.with_rms,
            trainer.x.layout,
            trainer.x.flat.dtype,
            str(trainer.device),
            sha256_of_tensors(trainer.frozen),
        )
        KNOWN[trainer] = TakenApart((form(trainer.algorithm), workload, how), numbers(trainer.algorithm))
    return KNOWN[trainer]


class Trainers:
    """The trainers of members, which remember the steps that they have recorded."""

    def __init__(self) -> None:
        self.kept: OrderedDict[Hashable, MembersTrainer] = OrderedDict()

    def of(self, trainers: Sequence[LocalTrainer]) -> tuple[MembersTrainer, list[Tensor]]:
        """The trainer of blocks (b) of members with these trainers, and the numbers in which their methods differ, (b)
        each."""
        first = taken_apart(trainers[0])
        apart = differing([taken_apart(trainer).numbers for trainer in trainers])
        same = tuple((path, value) for path, value in first.numbers.items() if path not in apart)
        key = (first.form, tuple(apart), same)
        if key not in self.kept:
            self.kept[key] = MembersTrainer(trainers[0], tuple(apart))
        self.kept.move_to_end(key)
        while len(self.kept) > MOST_TRAINERS:
            self.kept.popitem(last=False)
        return self.kept[key], list(apart.values())


def train_together(parts: Sequence[Part], trainers: Trainers) -> list[TaskResult]:
    """The results of the tasks of some parts that have a common form. trainers: of earlier rounds of this process."""
    began = time.perf_counter()
    most = max(2, MOST_NUMBERS // parts[0].under_way.trainer.x.flat.numel())
    for group in groups_of_blocks(parts, most):
        _train_blocks(group, trainers)
    results = [part.worker.end(part.under_way) for part in parts]
    each = (time.perf_counter() - began) / len(parts)
    return [result._replace(facts={**result.facts, "seconds": each}) for result in results]


def groups_of_blocks(parts: Sequence[Part], most: int) -> Iterator[list[tuple[Part, slice]]]:
    """The blocks that are trained at once: of the same form, and of at most so many clients, unless it is one block.

    The first blocks of all parts come first, then the second ones, and so on: the blocks of a part keep their order.
    Among the first ones of all parts any order will do, so that those of the same form are trained at once.
    """
    for at_once in zip_longest(*(part.blocks for part in parts)):
        by_form: dict[BlockForm, list[tuple[Part, slice]]] = {}
        for each in at_once:
            if each is not None:
                by_form.setdefault(BlockForm.of(each[0].under_way.batches.drawn, each[1]), []).append(each)
        for same in by_form.values():
            group: list[tuple[Part, slice]] = []
            for each in same:
                if group and clients_in([*group, each]) > most:
                    yield group
                    group = []
                group.append(each)
            yield group


def clients_in(blocks: Sequence[tuple[Part, slice]]) -> int:
    return sum(block.stop - block.start for _, block in blocks)


def _train_blocks(blocks: Sequence[tuple[Part, slice]], trainers: Trainers) -> None:
    """Train the clients of some blocks at once, and put each block's result where the run alone would put it."""
    counts = [block.stop - block.start for _, block in blocks]
    of_block = torch.arange(len(blocks)).repeat_interleave(torch.tensor(counts))  # (c,) the block of each client
    trainer, values = trainers.of([part.under_way.trainer for part, _ in blocks])
    if trainer.tapes is not None:
        trainer.tapes.begin_round(blocks[0][0].under_way.task.round)
    states = pytree.tree_map(
        lambda *leaves: torch.cat([leaf.expand(c, *leaf.shape) for c, leaf in zip(counts, leaves, strict=True)]),
        *(part.under_way.public for part, _ in blocks),
    )
    public = MembersPublic(states, tuple(to_device(value[of_block], trainer.device) for value in values))
    clients = [part.worker.load_block(part.under_way, block) for part, block in blocks]
    client = pytree.tree_map(lambda *leaves: torch.cat(leaves), *clients)
    steps = torch.cat([part.under_way.batches.drawn.steps[block] for part, block in blocks])
    result = trainer.train_block(public, client, steps, joined_batches(blocks))
    begin = 0
    for (part, block), count in zip(blocks, counts, strict=True):
        own = slice(begin, begin + count)
        message, state = pytree.tree_map(lambda leaf, own=own: leaf[own], (result.message, result.client))
        rms = None if result.rms is None else result.rms[own]
        own_result = LocalResult(message, state, result.loss[own], result.gradients, rms)
        part.worker.put_block(part.under_way, block, own_result)
        begin += count


def joined_batches(blocks: Sequence[tuple[Part, slice]]) -> BlockBatches:
    """Local step -> the batches of the clients of all blocks, as `LocalTrainer.train_block` takes them. A client that
    has no such step gets the batch of its block's last one. The blocks have one form."""
    form = BlockForm.of(blocks[0][0].under_way.batches.drawn, blocks[0][1])
    drawn = [part.under_way.batches.of_block(form) for part, _ in blocks]
    longest = max(batches.rows.shape[1] for batches in drawn)

    def joined(tensors: Sequence[Tensor]) -> Tensor:
        """(c, K, …): tensors (c, k, …) of the blocks, one after another."""
        own = [tensor[block] for tensor, (_, block) in zip(tensors, blocks, strict=True)]
        missing = [longest - tensor.shape[1] for tensor in own]
        return torch.cat(
            [torch.cat([t, *[t[:, -1:]] * m], dim=1) if m else t for t, m in zip(own, missing, strict=True)]
        )

    rows, keys = joined([batches.rows for batches in drawn]), joined([batches.keys for batches in drawn])
    weight = None
    if drawn[0].weight is not None:
        weight = joined([batches.weight for batches in drawn if batches.weight is not None])
    counts = [block.stop - block.start for _, block in blocks]
    device = keys.device

    def column(name: str, step_rows: Tensor) -> Tensor:
        """(c, B, …): a column at rows (c, B), one gather if all members have the same data."""
        columns = [batches.columns[name] for batches in drawn]
        if all(each.data_ptr() == columns[0].data_ptr() for each in columns):
            found = columns[0].index_select(0, step_rows.reshape(-1))
        else:
            own = zip(columns, step_rows.split(counts), strict=True)
            found = torch.cat([each.index_select(0, at.reshape(-1)) for each, at in own])
        return to_device(found.view(*step_rows.shape, *found.shape[1:]), device)

    def batches(k: int) -> dict[str, Tensor]:
        for part, _ in blocks:
            part.worker.beat()
        batch = {name: column(name, rows[:, k]) for name in drawn[0].columns}
        batch["key"] = keys[:, k]
        return batch if weight is None else {**batch, "weight": weight[:, k]}

    return batches


class Evaluation(NamedTuple):
    """An evaluation that a member needs."""

    worker: Worker
    tasks: Sequence[TestSlice | ClientGroup]
    broadcast: Broadcast


def evaluated_form(evaluation: Evaluation) -> Hashable:
    """What evaluations must have in common to be made in one pass over the rows: the workload and the rows."""
    worker = evaluation.worker
    data = worker.data
    addresses = tuple((name, c.data_ptr(), c.shape) for rows in (data.train, data.test) for name, c in rows.items())
    workload = identity(worker.run_spec.workload, without=("partition",))
    how = (worker.kernels, worker.x.layout, worker.x.flat.dtype, str(worker.device))
    size = worker.run_spec.experiment.evaluate.batch
    return (workload, how, addresses, id(data.client_index), size, tuple(evaluation.tasks))


@torch.no_grad()
def evaluate_together(evaluations: Sequence[Evaluation]) -> list[list[TaskResult]]:
    """The results of evaluations that have a common form, for each of them."""
    worker, tasks, _ = evaluations[0]
    models = [each.worker.parameters(each.broadcast) for each in evaluations]
    found: list[list[TaskResult]] = [[] for _ in evaluations]
    for task in tasks:
        for each in evaluations:
            each.worker.beat()
        for results, metrics in zip(found, worker.metrics(models, task), strict=True):
            results.append(TaskResult(task.index, [], *metrics))
    return found


class MembersPublic(NamedTuple):
    """The public states of the members of a block, and the numbers in which their methods differ; the clients' axis is
    the first one of every leaf."""

    state: Any
    numbers: tuple[Tensor, ...]  # (c,) each


class MembersTrainer(LocalTrainer):
    """Trains blocks with clients of several members. Its public states are `MembersPublic`."""

    def __init__(self, one: LocalTrainer, paths: tuple[Path, ...]) -> None:
        """one: a member's trainer. paths: of the numbers in which the members' methods differ."""
        vars(self).update(vars(one))
        self.method, self.paths = one.algorithm, paths
        self.tapes = one.kernels.tapes(one.device)

    def _take(self, numbers: tuple[Tensor, ...]) -> None:
        """Make the method that of one client under vmap."""
        self.algorithm = with_numbers(self.method, dict(zip(self.paths, numbers, strict=True)))

    def _call(self, name: str, function: Callable[..., Any], *given: Any) -> Any:
        """The result of a function for all clients, the first axis of every leaf of its arguments and its result."""
        at_once = vmap(function)
        return at_once(*given) if self.tapes is None else self.tapes.call(name, at_once, *given)

    def _begin_block(self, public: MembersPublic, client: Any, steps: Tensor) -> Any:
        def begin(public: MembersPublic, client: Any) -> Any:
            self._take(public.numbers)
            return self.algorithm.client_begin(public.state, client)

        return self._call("begin", begin, public, client)

    def _block_step(self, public: MembersPublic) -> Callable[..., tuple[Any, Tensor]]:
        def step(public: MembersPublic, client: Any, local: Any, batch: Batch, done: Tensor) -> tuple[Any, Tensor]:
            self._take(public.numbers)
            return self.step(BatchOracle(Gradient.apply, self, batch, done), public.state, client, local)

        return lambda client, local, batch, done: self._call("step", step, public, client, local, batch, done)

    def _finish_block(self, public: MembersPublic, client: Any, local: Any) -> tuple[Any, Any]:
        def finish(public: MembersPublic, client: Any, local: Any) -> tuple[Any, Any]:
            self._take(public.numbers)
            return self.finish(public.state, client, local)

        return self._call("finish", finish, public, client, local)

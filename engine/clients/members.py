"""Trains the clients of several runs at once: runs of one process that differ in numbers, seeds or data.

Such runs are called members. The clients of their blocks lie one after another along the clients' axis of one larger
block. There the public state has that axis too, since every member has its own, and so have the numbers in which the
members' methods differ. Everything else is as in a run alone: each member has its own batches and adds up its own
messages, block by block. So the arithmetic of a client and the order of all sums are those of the run alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import repeat, zip_longest
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..accelerators.transfer import to_device
from ..cohorts.tasks import Broadcast, TrainingTask
from ..kernels.vectorised import vectorised
from ..memory import Recent
from ..method_form.numbers import Path, differing, identity, with_numbers
from ..reduction.tree import TaskResult
from .batches import BlockForm
from .evaluation import ClientGroup, TestSlice
from .local_training import Batch, BatchesOfStep, BatchOracle, Gradient, LocalResult, LocalTrainer
from .worker import TaskUnderWay, Worker

MOST_NUMBERS = 1 << 18
"""The largest product of the clients in a block of several members and the parameters of their model, so that a vector
of all of them stays in the cache of a processor."""
MOST_TRAINERS = 8
"""How many trainers of members are kept."""


BlockUnderWay = tuple[TaskUnderWay, slice]
"""A block of a member's task: (the task, the positions of the block's clients in it)."""


def can_be_joined(worker: Worker, tasks: Sequence[TrainingTask]) -> bool:
    """Whether tasks may be trained together with those of other members: clients run at once, in blocks of two or more.
    A client that is alone in its block runs without vmap, and other kernels add up its message."""
    if not worker.vectorise or worker.recorder is not None or worker.alone:
        return False
    plain = all(task.targets is None and not task.warm_start for task in tasks)
    return plain and all(int(np.diff((0, *task.cuts)).min()) > 1 for task in tasks)


def common_form(task: TaskUnderWay) -> Hashable:
    """What tasks must have in common to be trained together."""
    columns = tuple((name, column.dtype, column.shape[1:]) for name, column in task.batches.columns.items())
    return (task.trainer.form, columns)


def recent_trainers() -> Recent[MembersTrainer]:
    """Trainers of members, which remember the steps that they have recorded."""
    return Recent(MOST_TRAINERS)


def trainer_of(trainers: Sequence[LocalTrainer], recent: Recent[MembersTrainer]) -> tuple[MembersTrainer, list[Tensor]]:
    """The trainer of blocks (b) of members with these trainers, and the numbers in which their methods differ, (b)
    each. recent: of earlier blocks."""
    first = trainers[0]
    apart = differing([trainer.numbers for trainer in trainers])
    same = tuple((path, value) for path, value in first.numbers.items() if path not in apart)
    key = (first.form, tuple(apart), same)
    return recent.of(key, lambda: MembersTrainer(first, tuple(apart))), list(apart.values())


def train_together(tasks: Sequence[TaskUnderWay], recent: Recent[MembersTrainer]) -> list[TaskResult]:
    """The results of some tasks that have a common form. recent: the trainers of earlier rounds of this process."""
    began = time.perf_counter()
    most = max(2, MOST_NUMBERS // tasks[0].trainer.x.flat.numel())
    for group in groups_of_blocks(tasks, most):
        _train_blocks(group, recent)
    results = [task.worker.end(task) for task in tasks]
    each = (time.perf_counter() - began) / len(tasks)
    return [result._replace(facts={**result.facts, "seconds": each}) for result in results]


def groups_of_blocks(tasks: Sequence[TaskUnderWay], most: int) -> Iterator[list[BlockUnderWay]]:
    """The blocks that are trained at once: of the same form, and of at most so many clients, unless it is one block.

    The first blocks of all tasks come first, then the second ones, and so on: the blocks of a task keep their order.
    Among the first ones of all tasks any order will do, so that those of the same form are trained at once.
    """
    for at_once in zip_longest(*(zip(repeat(task), task.blocks()) for task in tasks)):
        by_form: dict[BlockForm, list[BlockUnderWay]] = {}
        for each in at_once:
            if each is not None:
                by_form.setdefault(BlockForm.of(each[0].batches.drawn, each[1]), []).append(each)
        for same in by_form.values():
            group: list[BlockUnderWay] = []
            for each in same:
                if group and clients_in([*group, each]) > most:
                    yield group
                    group = []
                group.append(each)
            yield group


def clients_in(blocks: Sequence[BlockUnderWay]) -> int:
    return sum(block.stop - block.start for _, block in blocks)


def _train_blocks(blocks: Sequence[BlockUnderWay], recent: Recent[MembersTrainer]) -> None:
    """Train the clients of some blocks at once, and put each block's result where the run alone would put it."""
    counts = [block.stop - block.start for _, block in blocks]
    of_block = torch.arange(len(blocks)).repeat_interleave(torch.tensor(counts))  # (c,) the block of each client
    trainer, values = trainer_of([task.trainer for task, _ in blocks], recent)
    if trainer.tapes is not None:
        trainer.tapes.begin_round(blocks[0][0].task.round)
    states = pytree.tree_map(
        lambda *leaves: torch.cat([leaf.expand(c, *leaf.shape) for c, leaf in zip(counts, leaves, strict=True)]),
        *(task.public for task, _ in blocks),
    )
    public = MembersPublic(states, tuple(to_device(value[of_block], trainer.device) for value in values))
    clients = [task.worker.load_block(task, block) for task, block in blocks]
    client = pytree.tree_map(lambda *leaves: torch.cat(leaves), *clients)
    steps = torch.cat([task.batches.drawn.steps[block] for task, block in blocks])
    result = trainer.train_block(public, client, steps, joined_batches(blocks))
    begin = 0
    for (task, block), count in zip(blocks, counts, strict=True):
        own = slice(begin, begin + count)
        message, state = pytree.tree_map(lambda leaf, own=own: leaf[own], (result.message, result.client))
        rms = None if result.rms is None else result.rms[own]
        own_result = LocalResult(message, state, result.loss[own], result.gradients, rms)
        task.worker.put_block(task, block, own_result)
        begin += count


def joined_batches(blocks: Sequence[BlockUnderWay]) -> BatchesOfStep:
    """Local step -> the batches of the clients of all blocks, as `LocalTrainer.train_block` takes them. A client that
    has no such step gets the batch of its block's last one. The blocks have one form."""
    form = BlockForm.of(blocks[0][0].batches.drawn, blocks[0][1])
    drawn = [task.batches.of_block(form) for task, _ in blocks]
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
        for task, _ in blocks:
            task.worker.beat()
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
        at_once = vectorised(function)
        return at_once(*given) if self.tapes is None else self.tapes.call(name, at_once, *given)

    def begin_block(self, public: MembersPublic, client: Any, steps: Tensor) -> Any:
        def begin(public: MembersPublic, client: Any) -> Any:
            self._take(public.numbers)
            return self.algorithm.client_begin(public.state, client)

        return self._call("begin", begin, public, client)

    def block_step(self, public: MembersPublic) -> Callable[..., tuple[Any, Tensor]]:
        def step(public: MembersPublic, client: Any, local: Any, batch: Batch, done: Tensor) -> tuple[Any, Tensor]:
            self._take(public.numbers)
            return self.step(BatchOracle(Gradient.apply, self, batch, done), public.state, client, local)

        return lambda client, local, batch, done: self._call("step", step, public, client, local, batch, done)

    def finish_block(self, public: MembersPublic, client: Any, local: Any) -> tuple[Any, Any]:
        def finish(public: MembersPublic, client: Any, local: Any) -> tuple[Any, Any]:
            self._take(public.numbers)
            return self.finish(public.state, client, local)

        return self._call("finish", finish, public, client, local)

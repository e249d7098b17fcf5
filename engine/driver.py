"""The driver: holds the server's state, samples cohorts, adds up what hosts send, applies the rule, commits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..algorithms.contract import Message, Round
from ..workloads.base import Parts
from . import cohort
from .config import Local
from .errors import Diverged
from .fleet import Fleet
from .forms import Forms
from .host import Shared, Slice, Sums, Work, keep_heap
from .job import Job
from .store import Table

Record = dict[str, float]
"""One round's numbers, by column name; see `records`."""


class Setup(NamedTuple):
    """What the driver has to know of the data."""

    parts: Parts
    examples: int  # in the test set


class Driver:
    def __init__(self, job: Job, setup: Setup, fleet: Callable[[tuple[str, int]], Fleet]) -> None:
        """fleet: makes the hosts, given the store's (folder, capacity)."""
        experiment = job.experiment
        self.job, self.setup, self.plan = job, setup, experiment.federation
        keep_heap()
        torch.set_num_threads(experiment.engine.threads)
        x = job.start()
        self.method = job.method()
        self.forms = Forms(self.method, x)
        with torch.no_grad():
            self.server = self.method.server_init(x)
        self.block = block_size(job, x.flat.numel())
        everyone = self.plan.clients if self.method.opening else self.plan.cohort
        self.table = Table(self.forms.client, self.plan.clients, everyone, experiment.engine.store)
        self.visits = np.zeros(self.plan.clients, dtype=np.int64)
        self.round, self.version = 0, 0
        try:
            self.fleet = fleet((self.table.folder, self.table.capacity))
        except BaseException:
            self.table.remove()
            raise

    def close(self) -> None:
        self.fleet.close()
        self.table.remove()

    # --- rounds -----------------------------------------------------------------------------------------------------
    def rounds(self) -> Iterator[Record]:
        """Run to the last round; one record each."""
        opening = self._opening() if self.round == 0 else {}
        while self.round < self.plan.rounds:
            record = self._next()
            for column, value in opening.items():
                record[column] += value
            opening = {}
            yield record

    @torch.no_grad()
    def _opening(self) -> Record:
        """The pass over all clients that some methods begin with; its traffic and time count to round 1."""
        method = self.method.opening
        if method is None:
            return {}
        started = time.perf_counter()
        everyone = np.arange(self.plan.clients)
        forms = Forms(method, self.model())
        mean, _ = self._train(forms, everyone, opening=True)
        self.server = method.server_update(self.server, mean, self._where(len(everyone)))
        self.table.commit()
        return {**traffic(forms, len(everyone)), "time/seconds": time.perf_counter() - started}

    @torch.no_grad()
    def _next(self) -> Record:
        started = time.perf_counter()
        self.round += 1
        if self.job.changes:
            self.method = self.job.method(self.round)
        sampled = cohort.sample(self.job.experiment.seed, self.round, self.plan.clients, self.plan.cohort)
        mean, facts = self._train(self.forms, sampled)
        trained = time.perf_counter()
        self.server = self.method.server_update(self.server, mean, self._where(len(sampled)))
        self._check(mean)
        self.table.commit()
        self.visits[sampled] += 1
        record = {"round": self.round, **facts, **traffic(self.forms, len(sampled))}
        for name, value in mean.facts.items():
            record[f"client/{name}"] = float(value)
        record["time/train"] = trained - started
        if self._evaluates():
            record.update(self._evaluate())
        record["time/seconds"] = time.perf_counter() - started
        return record

    def _where(self, size: int) -> Round:
        return Round(self.round, self.plan.rounds, size, self.plan.clients)

    def _train(self, forms: Forms, sampled: np.ndarray, opening: bool = False) -> tuple[Message, Record]:
        sizes = self.setup.parts.sizes
        local = Local(epochs=1, batch=self.plan.local.batch) if opening else self.plan.local
        tasks = cohort.plan(sampled, sizes[sampled], local, self.block)
        examples = float(sizes[sampled].sum())
        read, write = self.table.reserve(sampled)
        place = {int(client): i for i, client in enumerate(sampled)}
        works = []
        for task in tasks:
            at = np.array([place[int(client)] for client in task.clients])
            uniform = self.plan.weights == "uniform"
            weights = np.ones(len(at)) if uniform else sizes[task.clients] * (len(sampled) / examples)
            works.append(Work(task, self.round, opening, self.visits[task.clients], weights, read[at], write[at]))
        leaves, facts = self._reduce("train", works, self._share(self.server.public))
        seconds = facts.pop("seconds")
        record = {
            "train/loss": facts["loss"] / len(sampled),
            "client/count": len(sampled),
            "client/steps": facts["steps"],
            "client/gradients": facts["gradients"],
            "time/hosts": seconds,
        }
        return forms.mean([torch.as_tensor(leaf) for leaf in leaves], len(sampled)), record

    def _share(self, state: Any) -> Shared:
        self.version += 1
        return Shared(self.version, [leaf.cpu().numpy() for leaf in pytree.tree_leaves(state)])

    def _reduce(self, call: Any, tasks: list[Any], shared: Shared) -> tuple[list[np.ndarray], Record]:
        """Sums over all tasks, added in the order of their numbers, whichever came first."""
        waiting: dict[int, Sums] = {}
        leaves: list[np.ndarray] = []
        facts: Record = {}
        following = 0
        for result in self.fleet.map(call, tasks, shared):
            waiting[result.index] = result
            while following in waiting:
                part = waiting.pop(following)
                leaves = add(leaves, part.leaves) if following else [np.array(leaf) for leaf in part.leaves]
                for name, value in part.facts.items():
                    facts[name] = facts.get(name, 0.0) + value
                following += 1
        return leaves, facts

    def _check(self, mean: Message) -> None:
        if not all(bool(torch.isfinite(leaf).all()) for leaf in pytree.tree_leaves(self.server)):
            norm = float(mean.facts["norm2"]) ** 0.5
            raise Diverged(self.round, f"the server's state is not finite (root mean square |delta| {norm:g})")

    # --- evaluation -------------------------------------------------------------------------------------------------
    def _evaluates(self) -> bool:
        every = self.job.experiment.evaluate.every
        return self.round == self.plan.rounds or (every > 0 and self.round % every == 0)

    def _evaluate(self) -> Record:
        size, total = self.job.experiment.evaluate.batch, self.setup.examples
        slices = [Slice(i, at, min(at + size, total)) for i, at in enumerate(range(0, total, size))]
        _, sums = self._reduce("evaluate", slices, self._share(self.model().flat))
        examples = sums.pop("examples")
        return {f"eval/{name}": value / examples for name, value in sums.items()}

    def model(self) -> Any:
        """The tree to evaluate."""
        return self.method.model(self.server)

    def tensors(self) -> dict[str, Tensor]:
        return {name: leaf.detach().clone() for name, leaf in self.model().items()}


def add(total: list[np.ndarray], part: list[np.ndarray]) -> list[np.ndarray]:
    """total + part, in total's memory."""
    for a, b in zip(total, part, strict=True):
        np.add(a, b, out=a)
    return total


def traffic(forms: Forms, clients: int) -> Record:
    """Bytes of one round: what is broadcast to and sent by each client, as it is stored."""
    return {"comm/bytes_down": float(clients * forms.down), "comm/bytes_up": float(clients * forms.up)}


def block_size(job: Job, parameters: int) -> int:
    engine, plan = job.experiment.engine, job.experiment.federation
    if engine.block == "auto":
        return cohort.auto_block(parameters, plan.cohort, job.device.type)
    return min(engine.block, plan.cohort)

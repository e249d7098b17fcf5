"""The driver: holds the server's state, samples cohorts, adds up what hosts send, applies the rule, commits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..algorithms.contract import Message, Round, Server
from ..workloads.base import Parts
from . import cohort
from .checkpoint import Checkpoints, Snapshot
from .compare import differences
from .config import Local
from .dispatch import Dispatch
from .errors import ConfigError, Diverged, FedFleetError
from .fleet import Fleet
from .forms import Forms
from .host import Shared, Slice, Sums, Work, keep_heap
from .job import Job
from .store import Place, Rows, Table

Record = dict[str, float]
"""One round's numbers, by column name; see `records`."""
Told = Record | str
"""What a run tells as it goes: a round's record, or a sentence for the log."""

EXPLODES = 1e6
"""Times its first norm (or 1) that a model may grow before the run counts as diverged."""


class Setup(NamedTuple):
    """What the driver has to know of the data."""

    parts: Parts
    examples: int  # in the test set


class Totals(NamedTuple):
    """A phase's results, added in the order of tasks."""

    leaves: list[np.ndarray]
    facts: Record
    clients: dict[str, np.ndarray]
    dropped: tuple[int, ...]


class Driver:
    """Build, `start` the fleet, then go through `rounds`; `close` in any case."""

    def __init__(self, job: Job, setup: Setup) -> None:
        experiment = job.experiment
        self.job, self.setup, self.plan = job, setup, experiment.federation
        keep_heap()
        torch.set_num_threads(experiment.engine.threads)
        x = job.start()
        self.method = job.method()
        self.forms = Forms(self.method, x)
        with torch.no_grad():
            self.server = self.method.server_init(x)
        self.limit = EXPLODES * max(1.0, float(x.norm()))
        self.block = block_size(job, x.flat.numel())
        self.visits = np.zeros(self.plan.clients, dtype=np.int64)
        self.round, self.version = 0, 0
        self.records: list[Record] = []
        self.events: list[str] = []
        self.done = False
        self.table = self._table()
        self.checkpoints: Checkpoints | None = None
        if job.directory is not None:
            self.checkpoints = Checkpoints(job.directory, experiment.checkpoint.keep, self.table)
            if job.resume:
                self._resume(self.checkpoints)

    def _table(self) -> Table:
        """Room for a row a client, a round's fresh rows, and the rows that checkpoints pin."""
        experiment, plan, directory = self.job.experiment, self.plan, self.job.directory
        everyone = plan.clients if self.method.opening else plan.cohort
        kept = 0 if directory is None else 1 + (experiment.checkpoint.keep if experiment.checkpoint.every else 0)
        folder = experiment.engine.store
        if directory is not None:
            folder = str(Path(folder or directory) / (f"state-{self.job.run_id}" if folder else "state"))
        narrow = experiment.engine.state_dtype == "bfloat16"
        place = (folder, narrow, directory is not None)
        return Table(self.forms.client, plan.clients, everyone + kept * plan.clients, place)

    def start(self, fleet: Callable[[Place], Fleet]) -> None:
        """fleet: makes the hosts, given where the clients' states are."""
        self.fleet = fleet(self.table.place)
        self.dispatch = Dispatch(self.fleet, self.job.experiment.engine.on_failure, self.tell)

    def tell(self, event: str) -> None:
        self.events.append(event)

    def close(self) -> None:
        """Stop the hosts; remove the clients' states unless the run can be resumed or they are to be kept."""
        if hasattr(self, "fleet"):
            self.fleet.close()
        if self.checkpoints is not None:
            self.checkpoints.finish()
        keep = self.job.experiment.engine.keep_state
        if keep or (self.checkpoints is not None and not self.done and self.checkpoints.pinned):
            return
        self.table.remove()
        if self.checkpoints is not None:
            self.checkpoints.remove()

    # --- rounds -----------------------------------------------------------------------------------------------------
    def rounds(self) -> Iterator[Told]:
        """Run to the last round: a record each, and sentences for the log as they come."""
        try:
            opening = self._opening() if self.round == 0 else {}
            while self.round < self.plan.rounds:
                record = self._next()
                for column, value in opening.items():
                    record[column] += value
                opening = {}
                self.records.append(record)
                self._checkpoint()
                yield from self._news()
                yield record
            self.done = True
        except Diverged:
            self.table.abort()
            yield from self._news()
            raise
        except (FedFleetError, KeyboardInterrupt):
            self.table.abort()
            self._save(last=True)
            yield from self._news()
            raise

    def _news(self) -> list[str]:
        news, self.events[:] = list(self.events), []
        return news

    @torch.no_grad()
    def _opening(self) -> Record:
        """The pass over all clients that some methods begin with; its traffic and time count to round 1."""
        method = self.method.opening
        if method is None:
            return {}
        started = time.perf_counter()
        everyone = np.arange(self.plan.clients)
        forms = Forms(method, self.model())
        mean, totals = self._train(forms, everyone, opening=True)
        self.server = method.server_update(self.server, mean, self._where(0, len(everyone)))
        self._commit(everyone, totals)
        return {**traffic(forms, len(everyone)), "time/seconds": time.perf_counter() - started}

    @torch.no_grad()
    def _next(self) -> Record:
        started, number = time.perf_counter(), self.round + 1
        if self.job.changes:
            self.method = self.job.method(number)
        sampled = cohort.sample(self.job.experiment.seed, number, self.plan.clients, self.plan.cohort)
        mean, totals = self._train(self.forms, sampled)
        trained = time.perf_counter()
        count = len(sampled) - len(totals.dropped)
        server = self.method.server_update(self.server, mean, self._where(number, count))
        self._check(server, number, totals)
        record = {
            "round": number,
            "train/loss": totals.facts["loss"] / count,
            "client/count": count,
            "client/dropped": len(totals.dropped),
            "client/steps": totals.facts["steps"],
            "client/gradients": totals.facts["gradients"],
            **traffic(self.forms, len(sampled), count),
            **{f"client/{name}": float(value) for name, value in mean.facts.items()},
            "time/hosts": totals.facts["seconds"],
            "time/state": totals.facts["state"],
            "time/train": trained - started,
        }
        self.server, self.round = server, number
        self._commit(sampled, totals)
        self.visits[np.setdiff1d(sampled, totals.dropped)] += 1
        if self._evaluates():
            record.update(self._evaluate())
        record["time/seconds"] = time.perf_counter() - started
        return record

    def _where(self, number: int, size: int) -> Round:
        return Round(number, self.plan.rounds, size, self.plan.clients)

    def _commit(self, sampled: np.ndarray, totals: Totals) -> None:
        digests = totals.clients.get("digest")
        if digests is not None:
            ordered = np.zeros((len(sampled), digests.shape[1]), dtype=np.uint8)
            ordered[np.searchsorted(sampled, totals.clients["id"])] = digests
            digests = ordered
        self.table.commit(digests, totals.dropped)

    def _train(self, forms: Forms, sampled: np.ndarray, opening: bool = False) -> tuple[Message, Totals]:
        """sampled: (S,) ascending."""
        sizes, number = self.setup.parts.sizes_of(sampled), 0 if opening else self.round + 1
        local = Local(epochs=1, batch=self.plan.local.batch) if opening else self.plan.local
        tasks = cohort.plan(sampled, sizes, local, self.block)
        read, write = self.table.reserve(sampled)
        weights = np.ones(len(sampled))
        if self.plan.weights == "examples":
            weights = sizes * (len(sampled) / float(sizes.sum()))
        works = []
        for task in tasks:
            at = np.searchsorted(sampled, task.clients)
            columns = (self.visits[task.clients], weights[at], read[at], write[at])
            works.append(Work(task, number, opening, *columns))
        totals = self._reduce("train", works, self._share(self.server.public))
        if not totals.leaves:
            raise ConfigError(f"round {number}: every client of the cohort failed; see the log for their errors")
        leaves = [torch.as_tensor(leaf) for leaf in totals.leaves]
        count = len(sampled) - len(totals.dropped)
        return forms.mean(leaves, count, totals.facts["weight"]), totals

    def _share(self, state: Any) -> Shared:
        self.version += 1
        return Shared(self.version, [leaf.cpu().numpy() for leaf in pytree.tree_leaves(state)])

    def _reduce(self, call: Any, tasks: list[Any], shared: Shared) -> Totals:
        """Sums over all tasks, added in the order of their numbers, whichever came first."""
        waiting: dict[int, Sums] = {}
        leaves: list[np.ndarray] = []
        facts: Record = {}
        clients: dict[str, list[np.ndarray]] = {}
        dropped: list[int] = []
        following = 0
        for result in self.dispatch.run(call, tasks, shared):
            waiting[result.index] = result
            while following in waiting:
                part = waiting.pop(following)
                following += 1
                leaves = add(leaves, part.leaves) if leaves else [np.array(leaf) for leaf in part.leaves]
                for name, value in part.facts.items():
                    facts[name] = facts.get(name, 0.0) + value
                for name, values in part.clients.items():
                    clients.setdefault(name, []).append(values)
                dropped += part.dropped
        together = {name: np.concatenate(values) for name, values in clients.items()}
        return Totals(leaves, facts, together, tuple(dropped))

    def _check(self, server: Server, number: int, totals: Totals) -> None:
        """Stop at the first round whose outcome is not a number, or far from where it began."""
        x = self.method.model(server)
        finite = all(bool(torch.isfinite(leaf).all()) for leaf in pytree.tree_leaves(server))
        if finite and float(x.norm()) <= self.limit:
            return
        moved = np.nan_to_num(totals.clients["norm2"], nan=np.inf, posinf=np.inf)
        worst = np.argsort(-moved, kind="stable")[:3]
        named = ", ".join(f"client {totals.clients['id'][i]} moved {moved[i] ** 0.5:.3g}" for i in worst)
        what = f"the model's norm is over {self.limit:.3g}" if finite else "the server's state is not finite"
        raise Diverged(number, f"{what}; {named}")

    # --- evaluation -------------------------------------------------------------------------------------------------
    def _evaluates(self) -> bool:
        every = self.job.experiment.evaluate.every
        return self.round == self.plan.rounds or (every > 0 and self.round % every == 0)

    def _evaluate(self) -> Record:
        size, total = self.job.experiment.evaluate.batch, self.setup.examples
        slices = [Slice(i, at, min(at + size, total)) for i, at in enumerate(range(0, total, size))]
        sums = self._reduce("evaluate", slices, self._share(self.model().flat)).facts
        examples = sums.pop("examples")
        return {f"eval/{name}": value / examples for name, value in sums.items()}

    def model(self) -> Any:
        """The tree to evaluate."""
        return self.method.model(self.server)

    def tensors(self) -> dict[str, Tensor]:
        return {name: leaf.detach().clone() for name, leaf in self.model().items()}

    # --- checkpoints ------------------------------------------------------------------------------------------------
    def _checkpoint(self) -> None:
        every = self.job.experiment.checkpoint.every
        if every and self.round % every == 0 and self.round < self.plan.rounds:
            self._save()

    def _save(self, last: bool = False) -> None:
        """Checkpoint the last committed round; `last`: wait until it is on the disk."""
        if self.checkpoints is None or self.round == 0:
            return
        leaves = [leaf.clone() for leaf in pytree.tree_leaves(self.server)]
        table = (self.table.row.copy(), self.table.digest.copy(), self.visits.copy())
        snapshot = Snapshot(self.round, leaves, *table, list(self.records), self.job.experiment.plain())
        self.events += self.checkpoints.save(snapshot)
        if last:
            self.events += self.checkpoints.finish()

    def _resume(self, checkpoints: Checkpoints) -> None:
        snapshot, self.events = checkpoints.load(self._wrong)
        if snapshot is None:
            told = f" ({'; '.join(self.events)})" if self.events else ""
            raise ConfigError(f"{self.job.directory} has no checkpoint to resume from{told}; start the run anew")
        if keys := differences(snapshot.config, self.job.experiment.plain()):
            raise ConfigError(f"the checkpoint is of another configuration: {'; '.join(keys)}; undo these changes")
        if snapshot.round >= self.plan.rounds:
            raise ConfigError(f"federation.rounds > {snapshot.round} must hold to resume, got {self.plan.rounds}")
        spec = pytree.tree_structure(self.server)
        device = self.job.device
        self.server = pytree.tree_unflatten([leaf.to(device) for leaf in snapshot.server], spec)
        self.table.restore(snapshot.row, snapshot.digest, list(checkpoints.pinned.values()))
        self.visits, self.round, self.records = snapshot.visits.copy(), snapshot.round, list(snapshot.records)
        self.tell(f"resumes after round {self.round}")

    def _wrong(self, snapshot: Snapshot) -> str:
        """What is wrong with the rows of a checkpoint, or ""."""
        if len(snapshot.row) != self.plan.clients:
            return ""  # another configuration: said so later
        held = np.flatnonzero(snapshot.row >= 0)
        if not self.table.place.folder or not len(held):
            return ""
        if int(snapshot.row.max()) >= self.table.capacity:
            return "rows beyond the store"
        found = Rows(self.table.place, self.forms.client).digests(torch.from_numpy(snapshot.row[held]))
        bad = int((found != snapshot.digest[held]).any(1).sum())
        return f"the states of {bad} clients are not what was written" if bad else ""


def traffic(forms: Forms, down: int, up: int | None = None) -> Record:
    """Bytes of one round: broadcast to `down` clients and sent by `up` of them, as they are stored."""
    up = down if up is None else up
    return {"comm/bytes_down": float(down * forms.down), "comm/bytes_up": float(up * forms.up)}


def add(total: list[np.ndarray], part: list[np.ndarray]) -> list[np.ndarray]:
    """total + part, in total's memory; a part may be empty."""
    for a, b in zip(total, part, strict=False):
        np.add(a, b, out=a)
    return total


def block_size(job: Job, parameters: int) -> int:
    engine, plan = job.experiment.engine, job.experiment.federation
    if engine.block == "auto":
        return cohort.auto_block(parameters, plan.cohort, job.device.type)
    return min(engine.block, plan.cohort)

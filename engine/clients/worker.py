"""A client worker: runs tasks, that is the local work of some clients, and slices of evaluations. Many clients, one
worker.

A worker knows data, model and method; it keeps no client's state (the store does) and nothing from task to task that
matters: the same task gives the same result anywhere, any number of times.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ...algorithms.contract import Algorithm
from ...algorithms.tree import Tree
from ...workloads.base import ClientIndex, Columns
from ..cohorts.tasks import Broadcast, TrainingTask
from ..config.run_spec import RunSpec
from ..config.schema import Local
from ..kernels.operators import kernels
from ..methods.state_spec import StateSpec
from ..reduction.accumulator import Accumulator, empty
from ..reduction.tree import TaskResult
from ..state.row_files import RowFiles, StateLayout
from .batches import Stream, stream
from .evaluation import ClientGroup, TestSlice, of_clients, of_rows
from .local_training import LocalTrainer
from .modules import evaluating


class Data(NamedTuple):
    """A split as tensors: columns of equal length, and who has which training rows."""

    train: dict[str, Tensor]
    test: dict[str, Tensor]
    client_index: ClientIndex

    @staticmethod
    def of(train: Columns, test: Columns, client_index: ClientIndex) -> Data:
        return Data(_tensors(train), _tensors(test), client_index)


def _tensors(columns: Columns) -> dict[str, Tensor]:
    return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in columns.items()}


def keep_freed_memory() -> None:
    """Have malloc keep freed memory. By default every large tensor is a fresh mapping, whose page faults cost more than
    the arithmetic on it: 0.9 of 1.2 ms in a step of a 200,000-parameter network."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        mmap_threshold, trim_threshold = -3, -1
        libc.mallopt(mmap_threshold, 1 << 30)
        libc.mallopt(trim_threshold, 1 << 30)


class StreamedBatches:
    """Batches of the client at a place of a task's stream, see `trip.ClientBatches`."""

    def __init__(self, worker: Worker, batches: Stream, at: int) -> None:
        self.worker, self.batches, self.at, self.beat = worker, batches, at, worker.beat

    def __call__(self, steps: slice) -> dict[str, Tensor]:
        rows, keys, weight = self.batches.rows[self.at, steps], self.batches.keys[self.at, steps], self.batches.weight
        return self.worker.padded(rows, keys, weight, (self.at, steps))


class Worker:
    def __init__(self, run_spec: RunSpec, data: Data, place: StateLayout, beat: Callable[[], None]) -> None:
        """place: of the clients' states; beat: called before every local step, a sign of life."""
        keep_freed_memory()
        engine = run_spec.experiment.engine
        torch.set_num_threads(engine.threads)
        self.run_spec, self.data, self.device = run_spec, data, run_spec.device
        self.x = run_spec.initial_model()
        self.state_spec = StateSpec(run_spec.method(), self.x)
        keeps = bool(place.folder and pytree.tree_leaves(self.state_spec.client))
        self.rows = RowFiles(place, self.state_spec.client) if keeps else None
        self.place, self.beat = place, beat
        self.vectorise, self.kernels = engine.vectorise, run_spec.kernels
        self.trainer: tuple[tuple[int, bool], LocalTrainer] | None = None
        self.shared: tuple[int, Any] = (-1, None)
        self.fresh: tuple[Any, Any] = (None, None)  # a public state, and a client's before its first visit to it
        self.gathering = 0.0  # seconds so far

    def perform(self, call: str, task: Any, broadcast: Broadcast) -> TaskResult:
        """Run a task of a phase. call: "train" or "evaluate"."""
        return self.train(task, broadcast) if call == "train" else self.evaluate(task, broadcast)

    # --- training -------------------------------------------------------------------------------------------------
    @torch.no_grad()
    def train(self, work: TrainingTask, shared: Broadcast) -> TaskResult:
        """The sums of the messages of a task's clients; their new states go to fresh rows."""
        started = time.perf_counter()
        trainer = self._trainer_for(work.round, work.warm_start)
        public = self._public(shared, trainer.algorithm)
        local = self.run_spec.experiment.federation.local
        if work.warm_start:
            local = Local(epochs=1, batch=local.batch)
        self.gathering, began = 0.0, time.perf_counter()
        given = (self.data.client_index, work.task.clients, work.visits, local, self.run_spec.experiment.seed)
        batches = stream(*given, native=self.kernels != "torch")
        drawn = time.perf_counter() - began
        total = Accumulator(trainer.state_spec, len(work.task.cuts), self.kernels, self.memory)
        begin = 0
        for end in work.task.cuts:
            self._block(trainer, public, work, batches, slice(begin, end), total)
            begin = end
        total.times["data"] = drawn + self.gathering
        leaves, facts, clients = total.result()
        seconds = time.perf_counter() - started
        return TaskResult(
            work.index,
            [leaf.numpy() for leaf in leaves],
            {**facts, **total.times, "seconds": seconds},
            {"id": work.task.clients, **clients},
            branch=work.branch,
        )

    def _block(
        self, trainer: LocalTrainer, public: Any, work: TrainingTask, batches: Stream, part: slice, total: Accumulator
    ) -> None:
        """part: places in the task of the block's clients, who are run at once or one by one."""
        if self.vectorise and part.stop - part.start > 1:
            self._together(trainer, public, work, batches, part, total)
        else:
            for at in range(part.start, part.stop):
                self._alone(trainer, public, work, batches, at, total, only=part.stop - part.start == 1)
        total.end_block()

    def _together(
        self, trainer: LocalTrainer, public: Any, work: TrainingTask, batches: Stream, part: slice, total: Accumulator
    ) -> None:
        """A block at once."""
        began = time.perf_counter()
        clients = self._states(trainer.algorithm, public, torch.from_numpy(work.read[part]))
        total.times["state"] += time.perf_counter() - began
        steps = batches.steps[part]
        outcome = trainer.train_block(public, clients, steps, lambda k: self._batch(batches, part, k))
        total.add_block(outcome, steps.numpy(), work.weights[part])
        self._keep(total, lambda rows: rows.write(torch.from_numpy(work.write[part]), outcome.client))

    def _alone(
        self,
        trainer: LocalTrainer,
        public: Any,
        work: TrainingTask,
        batches: Stream,
        at: int,
        total: Accumulator,
        only: bool,
    ) -> None:
        """One client of a block; only: there is no other."""
        began, row = time.perf_counter(), int(work.read[at])
        client = self._fresh(trainer.algorithm, public) if row < 0 or self.rows is None else self.rows.read_one(row)
        total.times["state"] += time.perf_counter() - began
        steps = batches.steps[at : at + 1].numpy()
        outcome = trainer.train_client(public, client, int(steps[0]), StreamedBatches(self, batches, at))
        total.add_one(outcome, steps, work.weights[at : at + 1], only)
        self._keep(total, lambda rows: rows.write_one(int(work.write[at]), outcome.client))

    def _keep(self, total: Accumulator, write: Callable[[RowFiles], np.ndarray]) -> None:
        """write: to fresh rows, gives their digests."""
        if self.rows is None:
            return
        began = time.perf_counter()  # what is timed is waiting for no device: adding up has done that
        digests = write(self.rows)
        if self.place.digests:
            total.clients.setdefault("digest", []).append(digests)
        total.times["state"] += time.perf_counter() - began

    def memory(self, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        """For a task's sums, float64."""
        return empty(shapes)

    def _fresh(self, algorithm: Algorithm, public: Any) -> Any:
        """A client's state before its first visit."""
        if self.fresh[0] is not public:
            self.fresh = public, algorithm.client_init(public)
        return self.fresh[1]

    def _states(self, algorithm: Algorithm, public: Any, read: Tensor) -> Any:
        """The clients' states, stacked; those on their first visit get their initial one."""
        fresh = self._fresh(algorithm, public)
        if self.rows is None or bool((read < 0).all()):
            return pytree.tree_map(lambda leaf: leaf.expand(len(read), *leaf.shape), fresh)
        return self.rows.read(read, fresh)

    def _batch(self, batches: Stream, part: slice, k: int) -> dict[str, Tensor]:
        """Step k of a block's clients, short batches padded."""
        return self.padded(batches.rows[part, k], batches.keys[part, k], batches.weight, (part, k))

    def padded(self, rows: Tensor, key: Tensor, weight: Tensor | None, where: tuple[Any, Any]) -> dict[str, Tensor]:
        """rows: (n, B); key: (n,); weight: of all batches, those at `where` are these."""
        batch = self.gather(rows.reshape(-1), key)
        batch = {name: c if name == "key" else c.view(*rows.shape, *c.shape[1:]) for name, c in batch.items()}
        if weight is not None:
            batch["weight"] = weight[where].to(self.device, self.x.flat.dtype)
        return batch

    def gather(self, rows: Tensor, key: Tensor) -> dict[str, Tensor]:
        """rows: (n,) of the training set, whatever they are for; key: goes with them."""
        self.beat()
        began = time.perf_counter()
        batch = {name: column.index_select(0, rows).to(self.device) for name, column in self.data.train.items()}
        batch["key"] = key.to(self.device)
        self.gathering += time.perf_counter() - began
        return batch

    def _trainer_for(self, round: int, warm_start: bool) -> LocalTrainer:
        """The method as it is in a round; built anew only where schedules change it."""
        version = (round if self.run_spec.method_has_schedule else 1, warm_start)
        if self.trainer is None or self.trainer[0] != version:
            method = self.run_spec.method(version[0])
            chosen = method.warm_start if warm_start else method
            assert chosen is not None
            self.trainer = (
                version,
                LocalTrainer(chosen, self.run_spec.workload, self.x, self.kernels, self.run_spec.precision),
            )
        return self.trainer[1]

    def _public(self, shared: Broadcast, algorithm: Algorithm) -> Any:
        """What clients make of the broadcast."""
        if self.shared[0] != shared.version:
            leaves = [torch.from_numpy(leaf.copy()).to(self.device) for leaf in shared.leaves]
            self.shared = shared.version, algorithm.unpack(pytree.tree_unflatten(leaves, self.state_spec.public_spec))
        return self.shared[1]

    # --- evaluation -----------------------------------------------------------------------------------------------
    @torch.no_grad()
    def evaluate(self, part: TestSlice | ClientGroup, shared: Broadcast) -> TaskResult:
        model = Tree(torch.from_numpy(shared.leaves[0].copy()).to(self.device), self.x.layout)
        workload, p = self.run_spec.workload, dict(model.items())
        train, client_index, size = self.data.train, self.data.client_index, self.run_spec.experiment.evaluate.batch
        with kernels(self.kernels), evaluating():
            if isinstance(part, TestSlice):
                return TaskResult(part.index, [], *of_rows(workload, p, self.data.test, part, self.device))
            return TaskResult(part.index, [], *of_clients(workload, p, train, client_index, part, size, self.device))

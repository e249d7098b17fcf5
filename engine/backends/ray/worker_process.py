"""The process of a worker: it claims tasks from shared memory until none is left, and gives signs of life."""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ....workloads.client_index import ClientIndex
from ...accelerators import settings
from ...accelerators.faults import is_device_lost
from ...accelerators.memory import bound_memory
from ...aggregation.planning import collects, result_bytes
from ...aggregation.vectors import vector_leaves
from ...clients.worker import Data, Worker
from ...cohorts.tasks import MOST_TASKS, Broadcast, PackedTasks, most_blocks
from ...errors import LONGEST_TRACEBACK, RAISED_BY_USERS, WorkerUnfit, type_and_first_line
from ...memory import release_freed_memory
from ...method_form.state_spec import StateSpec
from ...planning.kernel_proof import prove_here
from ...records.arrow_columns import from_arrow
from ...reduction.tree import TaskResult
from ...rounds.pool import Call, Failure, failure_of
from ...run_spec import RunSpec
from ...state.row_files import StateLayout
from ...stopping import on_signal
from .shared_memory import Address, SharedMemory, Spec
from .wakeup import Ends, Listener

LOST_DEVICE = 75
"""The exit status of a worker that lost its device."""


class Order(NamedTuple):
    """Tasks for workers to claim. number: counts the pool's orders. slots: of the shared memory, one for each task.
    specs: of the broadcast's arrays."""

    number: int
    call: Call
    slots: tuple[int, ...]
    tasks: list[Any] | PackedTasks
    version: int
    specs: tuple[Spec, ...]


SIZE_BITS = 32


def order_address(offset: int, size: int) -> int:
    """The number with which a worker is woken: the offset of the pickled order in the memory of the orders, and its
    size in bytes."""
    return offset << SIZE_BITS | size


class Signs(NamedTuple):
    """The files and pipes by which a worker gives signs of life and is woken.

    beats: the file with the times of all workers' last steps, in which `number` is this one's place. stack: the file to
    write its stack to at SIGUSR1. orders: the file with the orders.
    """

    number: int
    beats: str
    stack: str
    ends: Ends
    orders: str


class WorkerProcess(Worker):
    """A worker in a separate process, a Ray actor: it claims tasks from the shared memory until none is left."""

    def __init__(
        self,
        run_spec: RunSpec,
        train: Any,
        test: Any,
        client_index: ClientIndex,
        layout: StateLayout,
        signs: Signs,
        address: Address,
    ) -> None:
        self.number = signs.number
        self.shared_memory = SharedMemory(address)
        self.slot = -1  # of the task under way
        beats = np.memmap(signs.beats, np.float64, "r+")

        def beat() -> None:
            beats[self.number] = time.monotonic()

        on_signal()  # what is to end is decided by the driver
        self.listener, self.orders = Listener(signs.ends), os.open(signs.orders, os.O_RDONLY)
        self.stack = open(signs.stack, "w")  # noqa: SIM115 as long as the process
        faulthandler.register(signal.SIGUSR1, file=self.stack, all_threads=True)
        self.beat = beat
        self.unfit = why_not(partial(self._prepare, run_spec, train, test, client_index, layout))

    def _prepare(
        self, run_spec: RunSpec, train: Any, test: Any, client_index: ClientIndex, layout: StateLayout
    ) -> None:
        settings.apply(run_spec.device, run_spec.tf32, run_spec.experiment.engine.threads)
        bound_memory(run_spec.device, run_spec.experiment.engine.gpus)
        # Batches of training rows are gathered; those of test rows are views, in which a network might write.
        data = Data(from_arrow(train), from_arrow(test, copied=True), client_index)
        prove_here(run_spec, data)
        super().__init__(run_spec, data, layout, self.beat)

    def ready(self) -> int:
        """The process's number, once it has started. WorkerUnfit where no client of the run can be run here."""
        self.beat()
        if self.unfit:
            raise WorkerUnfit(self.unfit)
        return os.getpid()

    def serve(self) -> None:
        """Work on orders until the pool is gone."""
        try:
            while not self.unfit and (number := self.listener.wait()):
                offset, size = divmod(number, 1 << SIZE_BITS)
                self._work(pickle.loads(os.pread(self.orders, size, offset)))  # written by this run's own pool
                self.listener.done()
        finally:
            self.listener.close()

    def _work(self, order: Order) -> None:
        """Claim and run tasks until none of the order is left."""
        broadcast = Broadcast(order.version, self.shared_memory.posted(order.specs))
        claim = partial(self.shared_memory.claim, order.slots, order.number, self.number)
        while not self.unfit and (place := claim()) is not None:
            self.slot = order.slots[place]
            self.beat()
            try:
                outcome: TaskResult | Failure = self.perform(order.call, order.tasks[place], broadcast)
            except RAISED_BY_USERS as error:  # whatever a method, a workload or a plug-in raises
                lost = is_device_lost(error)
                where = f"worker {self.number}, process {os.getpid()}"
                outcome = failure_of(None, error, where, self.number)
            if isinstance(outcome, TaskResult):
                self.shared_memory.put(self.slot, outcome._replace(leaves=[]), outcome.leaves or [])
                continue
            if outcome.for_memory:
                release_freed_memory()
            if outcome.kind == "worker":
                self.unfit = outcome.cause  # it takes no other task, which would fail in the same way
            self.shared_memory.put(self.slot, outcome, [])
            if lost:  # a process can do nothing more with this device; the pool starts another one
                os._exit(LOST_DEVICE)

    def memory(self, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        """Views of the shared memory for the task's sums, float64, so that the sums need not be copied."""
        views = self.shared_memory.space(self.slot, tuple(Spec(shape, "<f8") for shape in shapes))
        return [torch.from_numpy(view) for view in views]


def why_not(prepare: Callable[[], None]) -> str:
    """Prepare a worker. Returns why that is impossible here, "" if it succeeded. A plug-in may even end the process
    when it is imported."""
    try:
        prepare()
    except RAISED_BY_USERS as error:
        return type_and_first_line(error)
    return ""


MemorySizes = tuple[int, int, int, int]
"""(head, arrays, reply, slots) of a shared memory: the bytes of the broadcast, the bytes of a slot's arrays and reply,
and the number of slots."""


def memory_sizes(run_spec: RunSpec) -> MemorySizes:
    """The sizes of a shared memory that holds what any phase of the run broadcasts and returns."""
    method, x = run_spec.method(), run_spec.initial_model()
    methods = [each for each in (method, method.warm_start) if each is not None]
    specs = [StateSpec(each, x) for each in methods]
    sums = max(sum(bytes_of(leaf) for leaf in pytree.tree_leaves(spec.message)) for spec in specs)
    if collects(run_spec):
        sums = max(sums, *(result_bytes(run_spec, spec.message) for spec in specs))
    public = max(sum(bytes_of(leaf) for leaf in pytree.tree_leaves(spec.public)) for spec in specs)
    plan = run_spec.experiment.federation
    public *= plan.pace.versions
    if plan.pace.versions > 1:
        block = run_spec.block(x.flat.numel())  # each of whose clients may belong to another update
        sums *= block * most_blocks(specs[0].sum_bytes * block)
    clients = plan.clients if len(methods) > 1 else plan.largest_cohort
    rows = run_spec.experiment.evaluate.batch  # whose columns may be wanted, or clients with one each
    failure = 8192 + 4 * LONGEST_TRACEBACK  # bytes of a traceback in UTF-8
    per_client = 128 + 16 * len(vector_leaves(specs[0].message)) * collects(run_spec)
    return public, sums, failure + per_client * max(clients, rows), MOST_TASKS


def bytes_of(leaf: Any) -> int:
    """The bytes of a leaf in the shared memory, as float64 or narrower."""
    return Spec(tuple(leaf.shape), "<f8").bytes

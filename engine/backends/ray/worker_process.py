"""A client worker as a process of its own: pulls tasks from the board until none is left, and shows that it lives."""

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

from ....workloads.base import ClientIndex
from ...clients.worker import Data, Worker
from ...cohorts.tasks import MOST_TASKS, Broadcast, PackedTasks
from ...config.run_spec import RunSpec
from ...errors import LONGEST_TRACEBACK, WorkerUnfit, type_and_first_line
from ...memory import release_freed_memory
from ...methods.state_spec import StateSpec
from ...planning.kernel_proof import prove_here
from ...records.arrow_columns import from_arrow
from ...reduction.tree import TaskResult
from ...state.row_files import StateLayout
from ..base import Call, Failure, failure
from .shared_memory import Address, Board, Spec
from .wakeup import Ends, Heard


class Order(NamedTuple):
    """What every worker is told of a batch: do `call` on any of `tasks` that nobody has claimed."""

    call: Call
    slots: list[int]
    tasks: list[Any] | PackedTasks
    version: int
    specs: tuple[Spec, ...]  # of what is broadcast


class Signs(NamedTuple):
    """Of a worker's life: its number, the file with the times of all workers' last steps, the one for its stack; what
    wakes it, and the file in which the order then is, as pickle gives it."""

    number: int
    beats: str
    stack: str
    bell: Ends
    orders: str


class HostProcess(Worker):
    def __init__(
        self,
        run_spec: RunSpec,
        train: Any,
        test: Any,
        client_index: ClientIndex,
        place: StateLayout,
        signs: Signs,
        board: Address,
    ) -> None:
        self.number = signs.number
        self.board, self.read = Board(board), Broadcast(-1, [])
        self.slot = -1  # of the task under way
        beats = np.memmap(signs.beats, np.float64, "r+")

        def beat() -> None:
            beats[self.number] = time.monotonic()

        self.bell, self.orders = Heard(signs.bell), os.open(signs.orders, os.O_RDONLY)
        self.stack = open(signs.stack, "w")  # noqa: SIM115 as long as the process
        faulthandler.register(signal.SIGUSR1, file=self.stack, all_threads=True)
        self.beat = beat
        self.unfit = built(partial(self._prepare, run_spec, train, test, client_index, place))

    def _prepare(self, run_spec: RunSpec, train: Any, test: Any, client_index: ClientIndex, place: StateLayout) -> None:
        data = Data(from_arrow(train), from_arrow(test), client_index)
        prove_here(run_spec, data)
        super().__init__(run_spec, data, place, self.beat)

    def ready(self) -> int:
        """The process's number. WorkerUnfit where no client of the run can be run here."""
        self.beat()
        if self.unfit:
            raise WorkerUnfit(self.unfit)
        return os.getpid()

    def serve(self) -> None:
        """Do what the driver orders, until it is gone."""
        try:
            while not self.unfit and (size := self.bell.wait()):
                self._work(pickle.loads(os.pread(self.orders, size, 0)))  # of this run's own driver
                self.bell.done()
        finally:
            self.bell.close()

    def _work(self, order: Order) -> None:
        """Do tasks until none is left."""
        if self.read.version != order.version:
            self.read = Broadcast(order.version, self.board.posted(order.specs))
        while not self.unfit and (place := self.board.claim(order.slots, self.number)) is not None:
            self.slot = order.slots[place]
            self.beat()
            try:
                sums: TaskResult | Failure = getattr(self, order.call)(order.tasks[place], self.read)
            except Exception as error:  # a method's, a workload's or a plug-in's, of whatever kind
                sums = failure(error, f"worker {self.number}, process {os.getpid()}", self.number)
            if isinstance(sums, Failure):
                if sums.kind == "memory":
                    release_freed_memory()
                if sums.kind == "worker":
                    self.unfit = sums.cause  # no other task is taken: it would fail alike
                self.board.put(self.slot, sums, [])
            else:
                self.board.put(self.slot, sums._replace(leaves=[]), sums.leaves or [])

    def memory(self, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        """Where the task's sums go, float64: made there, they need not be copied."""
        room = self.board.room(self.slot, tuple(Spec(shape, "<f8") for shape in shapes))
        return [torch.from_numpy(view) for view in room]


def built(build: Callable[[], None]) -> str:
    """Build a worker; why that cannot be, "" where it was built. A plug-in may even end the process as it is
    imported."""
    try:
        build()
    except (Exception, SystemExit) as error:
        return type_and_first_line(error)
    return ""


def slot_of(task: Any) -> int:
    return task.index % MOST_TASKS


def board_sizes(run_spec: RunSpec) -> tuple[int, int, int, int]:
    """(head, arrays, reply, slots) of a board that holds what any phase of the run shares and returns."""
    method, x = run_spec.method(), run_spec.initial_model()
    methods = [each for each in (method, method.warm_start) if each is not None]
    state_spec = [StateSpec(each, x) for each in methods]
    sums = max(sum(bytes_of(leaf) for leaf in pytree.tree_leaves(form.message)) for form in state_spec)
    public = max(sum(bytes_of(leaf) for leaf in pytree.tree_leaves(form.public)) for form in state_spec)
    plan = run_spec.experiment.federation
    clients = plan.clients if len(methods) > 1 else plan.cohort
    rows = run_spec.experiment.evaluate.batch  # whose columns may be wanted, or clients with one each
    failure = 8192 + 4 * LONGEST_TRACEBACK  # bytes of a traceback in UTF-8
    return public, sums, failure + 128 * max(clients, rows), MOST_TASKS


def bytes_of(leaf: Any) -> int:
    """On the board, as float64 or narrower."""
    return Spec(tuple(leaf.shape), "<f8").bytes

"""A worker as an actor of Ray. One thread runs its tasks; another one gives signs of life and reads rows for others."""

from __future__ import annotations

import faulthandler
import os
import signal
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import ray
from torch.utils import _pytree as pytree

from ....workloads.client_index import ClientIndex
from ...accelerators import settings
from ...accelerators.faults import is_device_lost
from ...accelerators.memory import bound_memory
from ...aggregation.message_rows import read_rows
from ...clients.worker import Data, Worker, keep_freed_memory
from ...cohorts.tasks import Broadcast
from ...errors import RAISED_BY_USERS, WorkerUnfit, type_and_first_line
from ...memory import collect_seldom, release_freed_memory
from ...planning.kernel_proof import prove_here
from ...reduction.tree import Leaves, PartialSum, TaskResult, TreeReducer, TreeShape, add_leaves
from ...rounds.pool import Call, Failure, failure_of
from ...run_spec import RunSpec
from ...state.row_files import RowFiles, StateLayout, make_files, remove_files, width
from ...stopping import on_signal
from .arrow_columns import from_arrow, shared
from .shared_sums import OwnFiles, Places

SIGNS = "signs"
"""The concurrency group of the calls that a worker answers while it runs a task."""
STACK_SECONDS = 2.0
"""The time in which a process writes its stack."""


class Order(NamedTuple):
    """What a call of a worker has beside its arrays.

    tasks: of the phase `call`, in the order of the tree. version: of the broadcast. leaves: the number of its leaves.
    places: those of the leaves that come with this call; the worker has the others. moved: the rows of client states
    whose bytes come with it, because another node wrote them. shape: of the phase's tree,
    in whose order the sums of the tasks are added; None if every result shall come with its own sums. file: the number
    of the worker's file for these sums, see shared_sums.py; None if they shall come with the reply.
    """

    call: Call
    tasks: list[Any]
    version: int
    leaves: int
    places: tuple[int, ...]
    moved: tuple[np.ndarray, ...]
    shape: TreeShape | None
    file: int | None


class Reply(NamedTuple):
    """The outcomes of an order's tasks, and the sums that do not come with them, or their places in the order's file.

    There are fewer outcomes than tasks if the worker cannot run clients (`unfit`, the reason) or has lost its device.
    """

    outcomes: list[TaskResult | Failure]
    sums: list[PartialSum]
    places: Places | None
    seconds: float
    unfit: str = ""
    lost_device: bool = False


class Started(NamedTuple):
    """A worker that has started: Ray's id of its node, the number of its process, the path of the file to which the
    process writes its stack at SIGUSR1, and the numbers of the open files for sums."""

    node: str
    process: int
    stack: str
    sum_files: list[int]


class StateFiles(NamedTuple):
    """Where the states of clients are stored. layout: on the driver's node, which has Ray's id `node`. sample: a client
    state. messages: the number of rows of messages, and the bytes of one."""

    layout: StateLayout
    node: str
    sample: Any
    messages: tuple[int, int]


class WorkerProcess(Worker):
    """A worker in a process of its own."""

    def __init__(
        self,
        run_spec: RunSpec,
        train: Any,
        test: Any,
        client_index: ClientIndex,
        frozen: dict[str, Any],
        files: StateFiles,
        number: int,
    ) -> None:
        """frozen: references to the model's frozen tensors in the object store. number: of the worker, for messages."""
        on_signal()  # what is to end is decided by the driver
        keep_freed_memory()
        self.number, self.beats, self.unfit = number, 0, ""
        self.leaves: dict[int, np.ndarray] = {}  # of the broadcast, by place
        self.stack = stack_file()
        faulthandler.register(signal.SIGUSR1, file=self.stack, all_threads=True)
        self.sum_files = OwnFiles()
        self.node = ray.get_runtime_context().get_node_id()
        self.own = files.node != self.node
        self.layout = own_files(files, run_spec, self.node) if self.own else files.layout
        keeps_state = bool(self.layout.folder and pytree.tree_leaves(files.sample))
        self.files = RowFiles(self.layout, files.sample) if keeps_state else None
        self.given = run_spec, train, test, client_index, frozen

    def ready(self) -> Started:
        """Prepare the worker, in the thread that runs its tasks: some settings of torch belong to a thread. Raises
        WorkerUnfit where no client of the run can be run here."""
        self.unfit = why_not(partial(self._prepare, *self.given))
        del self.given
        collect_seldom()
        if self.unfit:
            raise WorkerUnfit(self.unfit)
        return Started(self.node, os.getpid(), self.stack.name, self.sum_files.files)

    def _prepare(
        self, run_spec: RunSpec, train: Any, test: Any, client_index: ClientIndex, frozen: dict[str, Any]
    ) -> None:
        run_spec = run_spec.with_frozen(shared(frozen))
        settings.apply(run_spec.device, run_spec.tf32, run_spec.experiment.engine.threads)
        bound_memory(run_spec.device, run_spec.experiment.engine.gpus)
        # Batches of training rows are gathered; those of test rows are views, in which a network might write.
        data = Data(from_arrow(train), from_arrow(test, copied=True), client_index)
        prove_here(run_spec, data)
        super().__init__(run_spec, data, self.layout, self._live)
        if frozen:
            release_freed_memory()  # of the model as it was built

    def _live(self) -> None:
        self.beats += 1

    # --- tasks --------------------------------------------------------------------------------------------------------
    def run(self, order: Order, leaves: Leaves, *packed_rows: np.ndarray) -> Reply:
        """Run the tasks of an order. leaves, packed_rows: see `Order`."""
        began = time.perf_counter()
        self.leaves.update(zip(order.places, leaves, strict=True))
        for rows, packed in zip(order.moved, packed_rows, strict=True):
            assert self.files is not None
            self.files.unpack(rows, packed)
        broadcast = Broadcast(order.version, [self.leaves[place] for place in range(order.leaves)])
        outcomes: list[TaskResult | Failure] = []
        sums = None if order.shape is None else TreeReducer(order.shape, add_leaves)
        lost = False
        for task in order.tasks if not self.unfit else ():
            self.beat()
            try:
                outcome: TaskResult | Failure = self.perform(order.call, task, broadcast)
            except RAISED_BY_USERS as error:  # whatever a method, a workload or a plug-in raises
                lost = is_device_lost(error)
                outcome = failure_of(None, error, f"worker {self.number}, process {os.getpid()}", self.number)
            if isinstance(outcome, Failure):
                if outcome.for_memory:
                    release_freed_memory()
                if outcome.kind == "worker":
                    self.unfit = outcome.cause  # it takes no other task, which would fail in the same way
                    break
            elif sums is not None and outcome.leaves:
                sums.put(sums.shape.node_of(outcome), outcome.leaves)
                outcome = outcome._replace(leaves=None)
            outcomes.append(outcome)
            if lost:
                break
        parts = [] if sums is None else [PartialSum(*part) for part in sums.parts.items()]
        places = None if order.file is None else self.sum_files.write(order.file, parts)
        return Reply(outcomes, [] if places else parts, places, time.perf_counter() - began, self.unfit, lost)

    # --- answered while a task runs -----------------------------------------------------------------------------------
    @ray.method(concurrency_group=SIGNS)
    def seen(self) -> int:
        """How many signs of life there were: one before each task and each local step."""
        return self.beats

    @ray.method(concurrency_group=SIGNS)
    def packed(self, rows: np.ndarray) -> np.ndarray:
        """(c, bytes of a row) uint8: client states as they are stored, for another node."""
        assert self.files is not None
        return self.files.packed(rows)

    @ray.method(concurrency_group=SIGNS)
    def messages_in(self, rows: np.ndarray, width: int) -> np.ndarray:
        """(c, width) uint8: the messages in some rows, for the driver's node. width: bytes of a message."""
        return read_rows(self.layout.messages, rows, width)

    @ray.method(concurrency_group=SIGNS)
    def remove_files(self) -> None:
        """Remove the files that the workers of this node have made."""
        for folder in (self.layout.folder, self.layout.messages) if self.own else ():
            remove_files(folder)


def own_files(files: StateFiles, run_spec: RunSpec, node: str) -> StateLayout:
    """Where a node that is not the driver's stores client states and messages; all of its workers make these files."""
    parent, name = run_spec.experiment.engine.store or tempfile.gettempdir(), f"fedfleet-{run_spec.run_id}-{node[:12]}"
    layout, leaves = files.layout, pytree.tree_leaves(files.sample)
    if layout.folder:
        layout = layout._replace(folder=str(Path(parent) / name))
        if leaves:
            make_files(layout.folder, layout.capacity, width(leaves, layout.bfloat16))
    if layout.messages:
        layout = layout._replace(messages=str(Path(parent) / f"{name}-messages"))
        make_files(layout.messages, *files.messages)
    return layout


def why_not(prepare: Callable[[], None]) -> str:
    """Prepare a worker. Returns why that is impossible here, "" if it succeeded. A plug-in may even end the process
    when it is imported."""
    try:
        prepare()
    except RAISED_BY_USERS as error:
        return type_and_first_line(error)
    return ""


def stack_file() -> Any:
    """A file for the stack of this process, which lasts as long as the process. `name`: the path at which other
    processes of the node read it."""
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("fedfleet-stack")
        return open(f"/proc/{os.getpid()}/fd/{file}", "w", encoding="utf-8")
    return tempfile.NamedTemporaryFile("w", prefix="fedfleet-stack-", encoding="utf-8")  # as on macOS


def last_stack(process: int, path: str) -> str:
    """End a worker that hangs on this node. Returns its stack, also if it ran code that is not Python. path: see
    `Started`."""
    try:
        os.kill(process, signal.SIGUSR1)
        deadline, size = time.monotonic() + STACK_SECONDS, -1
        while time.monotonic() < deadline and (size <= 0 or os.stat(path).st_size != size):
            size = os.stat(path).st_size
            time.sleep(0.05)
        found = Path(path).read_bytes().decode(errors="replace")
        os.kill(process, signal.SIGKILL)
    except OSError:
        return "(it does not answer)"
    return found or "(it does not answer)"

"""What runs on a node of its own: the keeper of its rows, and workers that are called from afar.

Workers of the driver's node pull their tasks from a board in shared memory (workers.py). Where a run has several nodes,
the driver calls each worker, and Ray carries what is broadcast once to each node, and a task's sums back.
"""

from __future__ import annotations

import faulthandler
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError
from torch.utils import _pytree as pytree

from ....workloads.base import ClientIndex
from ...clients.worker import Data, Worker
from ...cohorts.tasks import Broadcast
from ...config.run_spec import RunSpec
from ...errors import WorkerUnfit
from ...memory import release_freed_memory
from ...methods.state_spec import StateSpec
from ...planning.kernel_proof import prove_here
from ...records.arrow_columns import from_arrow
from ...reduction.tree import Leaves, TaskResult, add_leaves
from ...state.row_files import RowFiles, StateLayout, make_files, remove_files, width
from ..base import Call, Failure, failure
from .task_splitting import Piece
from .worker_process import built

INLINE = 100 * 1024
"""Bytes of a result that Ray sends along with its news at once (its max_direct_call_object_size)."""
UNMOVED = "its clients' states could not be brought"
"""Beginning of the cause of a task that lacked its rows: no fault of its own, nor of its worker."""


class Keeper:
    """A node's rows, for other nodes to copy."""

    def __init__(self, run_spec: RunSpec, place: StateLayout, mine: bool) -> None:
        """mine: the files are made here and removed by `close`; else they are the run's own."""
        self.place, self.mine = place, mine
        sample = StateSpec(run_spec.method(), run_spec.initial_model()).client
        leaves = pytree.tree_leaves(sample)
        if mine:
            make_files(place.folder, place.capacity, width(leaves, place.narrow))
        self.rows = RowFiles(place, sample) if leaves else None

    def ready(self) -> str:
        """The node's id: it is there, and so are its files."""
        return ray.get_runtime_context().get_node_id()

    def read(self, rows: np.ndarray) -> np.ndarray:
        assert self.rows is not None
        return self.rows.packed(rows)

    def write(self, rows: np.ndarray, packed: np.ndarray) -> int:
        """Bytes that were written."""
        assert self.rows is not None
        self.rows.unpack(rows, packed)
        return packed.nbytes

    def add(self, left: Leaves, right: Leaves) -> Leaves:
        """Neighbours' sums, both of this node."""
        return add_leaves(left, right)

    def stack(self, number: int) -> str:
        """What a worker that hung was doing; "" for one that did not."""
        path = stack_file(self.place, number)
        return path.read_text(errors="replace") if path.is_file() else ""

    def close(self) -> None:
        if self.mine:
            remove_files(self.place.folder)


def stack_file(place: StateLayout, number: int) -> Path:
    return Path(place.folder) / f"stack-{number}"


class FarHost(Worker):
    """A worker that is called, one task at a time. Nobody can look at it from another node, so it looks after itself:
    if no step is taken for `patience` seconds, its stack goes to a file of its node and it ends."""

    def __init__(
        self,
        run_spec: RunSpec,
        train: Any,
        test: Any,
        client_index: ClientIndex,
        place: StateLayout,
        number: int,
        made: str,
    ) -> None:
        """made: waited for; the node's files are there."""
        self.number, self.armed = number, 0.0
        self.patience = run_spec.experiment.engine.patience
        self.stack = open(stack_file(place, number), "w")  # noqa: SIM115 as long as the process
        self.unfit = built(partial(self._prepare, run_spec, train, test, client_index, place))

    def _prepare(self, run_spec: RunSpec, train: Any, test: Any, client_index: ClientIndex, place: StateLayout) -> None:
        data = Data(from_arrow(train), from_arrow(test), client_index)
        prove_here(run_spec, data)
        super().__init__(run_spec, data, place, self._beat)

    def _beat(self) -> None:
        now = time.monotonic()
        if now - self.armed > self.patience / 20:
            self.armed = now
            faulthandler.dump_traceback_later(self.patience, exit=True, file=self.stack)

    def ready(self) -> int:
        """The process's number. WorkerUnfit where no client of the run can be run here."""
        if self.unfit:
            raise WorkerUnfit(self.unfit)
        return os.getpid()

    @ray.method(num_returns=2)
    def do(
        self, call: Call, task: Any, version: int, leaves: list[np.ndarray], moved: list[Any]
    ) -> tuple[TaskResult | Failure, Leaves]:
        """(the task's Sums or a Failure, its leaves): large leaves stay on this node until somebody asks for them.
        moved: references that are there once the rows that it reads are on this node."""
        where = f"worker {self.number}, process {os.getpid()}"
        try:
            ray.get(moved)
        except RayError as error:
            return Failure(f"{UNMOVED}: {type(error).__name__}", where), []
        self.armed = 0.0
        self._beat()
        try:
            sums = getattr(self, call)(task.work if isinstance(task, Piece) else task, Broadcast(version, leaves))
        except Exception as error:  # a method's, a workload's or a plug-in's, of whatever kind
            sums = failure(error, where, self.number)
        finally:
            faulthandler.cancel_dump_traceback_later()
        if isinstance(sums, Failure):
            if sums.kind == "memory":
                release_freed_memory()
            return sums, []
        if sum(leaf.nbytes for leaf in sums.leaves) < INLINE:
            return sums, []
        return sums._replace(leaves=None), sums.leaves

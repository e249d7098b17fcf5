"""What runs on each node of a cluster: the node's rows of client states, its workers, and the sums of their results.

The driver gives an agent tasks, and hears of their results; the sums stay with the agent, which adds neighbours in the
tree as they come, until the driver takes what is left of them at the end of the phase.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import ray
from torch.utils import _pytree as pytree

from ...clients.worker import keep_freed_memory
from ...cohorts.tasks import Broadcast
from ...config.run_spec import RunSpec
from ...reduction.tree import Leaves, PartialSum, TaskResult, TreeReducer, TreeShape, add_leaves
from ...state.row_files import RowFiles, StateLayout, make_files, remove_files, width
from ..base import Call, Failure
from .worker_pool import Finished, Hooks, WorkerPool, WorkerRequest
from .worker_process import MemorySizes


class News(NamedTuple):
    """What an agent tells the driver: lines for the log, outcomes of tasks, and how many workers it has."""

    log: list[str]
    outcomes: list[TaskResult | Failure]
    workers: int


class Begin(NamedTuple):
    call: Call
    broadcast: Broadcast
    shape: TreeShape
    repeated: bool


class Add(NamedTuple):
    version: int
    tasks: Sequence[Any]


class Drop(NamedTuple):
    done: threading.Event


Request = Begin | Add | Drop


class NodeAgent:
    """An actor of Ray's. One thread serves the workers; the driver's calls come in others."""

    def __init__(
        self,
        run_spec: RunSpec,
        data: Sequence[Any],
        layout: StateLayout,
        sample: Any,
        sizes: MemorySizes,
        make: bool,
        made: object = None,
    ) -> None:
        """data: references, see WorkerPool. sample: a client's state. sizes: of the shared memory.

        make: whether the files of rows are made here, and removed by `close`. made: what Ray waits for before it starts
        this, where another agent of the node makes the files. The driver gives `sample` and `sizes`, because this must
        also work on a node where the model cannot be built: what is wrong there is for its workers to say.
        """
        keep_freed_memory()
        self.run_spec, self.data, self.layout, self.sizes, self.mine = run_spec, data, layout, sizes, make
        leaves = pytree.tree_leaves(sample)
        keeps_state = bool(layout.folder and leaves)
        if make and keeps_state:
            make_files(layout.folder, layout.capacity, width(leaves, layout.narrow))
        self.rows = RowFiles(layout, sample) if keeps_state else None
        self.reading, self.writing = os.pipe()  # wakes the thread that serves the workers
        os.set_blocking(self.reading, False)
        self.version = -1  # of the phase, which is that of its broadcast
        self.changed = threading.Condition()
        self.log: list[str] = []
        self.requests: deque[Request] = deque()
        self.early: list[Add] = []  # whose phase has not begun yet
        self.outcomes: deque[TaskResult | Failure] = deque()
        self.error: BaseException | None = None
        self.ended = False

    # --- the workers ------------------------------------------------------------------------------------------------
    def start(self, worker_requests: Sequence[WorkerRequest]) -> str:
        """Start the workers and wait for them; the node's id. Raises WorkersLost."""
        self.pool = WorkerPool(
            self.run_spec,
            self.data,
            self.layout,
            Hooks(self._check, self.log.append),
            worker_requests,
            sizes=self.sizes,
        )
        self.thread = threading.Thread(target=self._serve, name="workers", daemon=True)
        self.thread.start()
        return ray.get_runtime_context().get_node_id()

    def _check(self) -> None:
        """The driver ends an agent by killing it; nothing else stops its waiting."""

    def begin(self, call: Call, version: int, leaves: Leaves, shape: TreeShape, repeated: bool) -> None:
        """Begin a phase. Tasks of the phase before that are still under way are finished, and their results dropped.

        repeated: the sums come with the results.
        """
        self._ask(Begin(call, Broadcast(version, leaves), shape, repeated))

    def add(self, version: int, tasks: Sequence[Any], *moves: Any) -> None:
        """Have the workers run these tasks of a phase. Ray may have this run before the phase's `begin`.

        moves: results of `write`, for which Ray waits, so that the rows that the tasks read are here.
        """
        self._ask(Add(version, tasks))

    def _ask(self, request: Request) -> None:
        with self.changed:
            if self.error is not None:
                raise self.error
            self.requests.append(request)
        os.write(self.writing, b"\n")

    def news(self, version: int, seconds: float) -> News:
        """Outcomes of a phase since the last call, as soon as there is one, but after so many seconds at the latest."""
        with self.changed:
            self.changed.wait_for(
                lambda: (self.version == version and self.outcomes) or self.error is not None, seconds
            )
            if self.error is not None:
                raise self.error
            outcomes = list(self.outcomes) if self.version == version else []
            news = News(list(self.log), outcomes, len(self.pool.workers))
            self.log.clear()
            if self.version == version:
                self.outcomes.clear()
            return news

    def lines(self) -> list[str]:
        """What the log should have and `news` has not told, for the driver that gives the workers up."""
        with self.changed:
            lines, self.log[:] = list(self.log), []
        return lines

    def sums(self) -> list[PartialSum]:
        """The sums of the phase's results, added as far as they are neighbours in the tree."""
        with self.changed:
            return [PartialSum(*item) for item in self.reducer.parts.items()]

    def drop(self) -> None:
        """Give the phase up, and wait until the workers are idle."""
        request = Drop(threading.Event())
        self._ask(request)
        request.done.wait()

    def _serve(self) -> None:
        """The thread of the workers: do what the driver asks, pass on results."""
        try:
            while not self.ended:
                self.pool.listen(self.reading)
                with suppress(BlockingIOError):  # emptied first: a later request writes again
                    os.read(self.reading, 1 << 16)
                with self.changed:
                    requests = list(self.requests)
                    self.requests.clear()
                for request in requests:
                    self._do(request)
                finished = list(self.pool.take())
                if finished:
                    self._pass_on(finished)
        except BaseException as error:
            with self.changed:
                self.error = error
                self.changed.notify_all()

    def _do(self, request: Request) -> None:
        if isinstance(request, Add):
            if request.version == self.version:
                self.pool.add(request.tasks)
            elif request.version > self.version:
                self.early.append(request)
            return
        self.pool.drop()
        if isinstance(request, Drop):
            self.version = -1
            request.done.set()
            return
        with self.changed:
            self.outcomes.clear()
            self.reducer, self.repeated = TreeReducer(request.shape, add_leaves), request.repeated
            self.version = request.broadcast.version
        self.pool.begin(request.call, request.broadcast)
        early, self.early = self.early, []
        for each in early:
            self._do(each)

    def _pass_on(self, finished: Sequence[Finished]) -> None:
        """Add up the results' sums, and hand the rest to the driver."""
        passed = []
        for each in finished:
            outcome = each.outcome
            if isinstance(outcome, TaskResult) and outcome.leaves:
                leaves = [np.array(leaf) for leaf in outcome.leaves]
                outcome = outcome._replace(leaves=leaves if self.repeated else None)
                if not self.repeated:
                    with self.changed:
                        self.reducer.put(self.reducer.shape.node_of(outcome), leaves)
            self.pool.release(each)
            passed.append(outcome)
        with self.changed:
            self.outcomes.extend(passed)
            self.changed.notify_all()

    # --- the rows ---------------------------------------------------------------------------------------------------
    def read(self, rows: np.ndarray) -> np.ndarray:
        """(c, bytes of a row) uint8: client states as they are stored, for another node."""
        assert self.rows is not None
        return self.rows.packed(rows)

    def write(self, rows: np.ndarray, packed: np.ndarray) -> int:
        """Store what another node's `read` returned. The number of bytes."""
        assert self.rows is not None
        self.rows.unpack(rows, packed)
        return packed.nbytes

    def answers(self) -> bool:
        """Whether the agent is alive."""
        return True

    def close(self) -> None:
        """Stop the workers, and remove the files that were made here."""
        self.ended = True
        if hasattr(self, "pool"):
            os.write(self.writing, b"\n")
            self.thread.join()
            self.pool.close()
        if self.mine and self.layout.folder:
            remove_files(self.layout.folder)

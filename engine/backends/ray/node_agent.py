"""The agent of a node of a cluster: it has the node's rows of client states, its workers, and the sums of their
results. The driver gives an agent tasks, and the agent sends news of their results. The sums stay with the agent, which
adds neighbours in the tree as they come, and sends what remains when no task is left.
"""

from __future__ import annotations

import os
import pickle
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
from torch.utils import _pytree as pytree

from ...aggregation.message_rows import read_rows
from ...clients.worker import keep_freed_memory
from ...cohorts.tasks import Broadcast
from ...errors import WorkersLost, type_and_first_line
from ...reduction.tree import Leaves, PartialSum, TaskResult, TreeReducer, TreeShape, add_leaves
from ...rounds.pool import Call, Failure
from ...run_spec import RunSpec
from ...state.row_files import RowFiles, StateLayout, make_files, remove_files, width
from ...stopping import on_signal
from .links import Address, Link
from .scheduler import AHEAD
from .worker_pool import Finished, Hooks, WorkerPool, WorkerRequest
from .worker_process import MemorySizes


class News(NamedTuple):
    """An agent's message to the driver: lines for the log, outcomes of tasks of the phase `version`, and the number of
    its workers. sums: those of the results since the last sums; they come when the agent has no task left, unless they
    come with the results. error: why the agent cannot serve its workers any more.
    """

    version: int
    log: list[str]
    outcomes: list[TaskResult | Failure]
    workers: int
    sums: list[PartialSum]
    error: Exception | None = None


class Begin(NamedTuple):
    """The description of a phase, see Phase. leaves: of its broadcast. with_sums: every result comes with its sums."""

    call: Call
    shape: TreeShape
    with_sums: bool
    leaves: Leaves


class Add(NamedTuple):
    """Tasks of the phase with the number `version`. left: the agent sends its outcomes as soon as at most so many tasks
    are without one, or a task has failed. begin: the phase begins with these tasks."""

    version: int
    tasks: Sequence[Any]
    left: int
    begin: Begin | None = None


class Drop(NamedTuple):
    done: threading.Event


class NodeAgent:
    """A Ray actor. One thread serves the workers, one takes the messages of the driver, and the calls of Ray run in
    others."""

    def __init__(
        self,
        run_spec: RunSpec,
        data: Sequence[Any],
        layout: StateLayout,
        sample: Any,
        sizes: MemorySizes,
        make: bool,
        made: object = None,
        messages: tuple[int, int] = (0, 0),
    ) -> None:
        """data: references, see WorkerPool. sample: a client's state. sizes: of the shared memory. messages: the number
        of rows of messages, and the bytes of one.

        make: whether this agent makes the files of rows and removes them in `close`. made: a value for which Ray waits
        before it starts this agent, if another agent of the node makes the files. The driver gives `sample` and
        `sizes`, because an agent must also work on a node where the model cannot be built: the workers there report
        what is wrong.
        """
        keep_freed_memory()
        on_signal()  # what is to end is decided by the driver
        self.run_spec, self.data, self.layout, self.sizes, self.mine = run_spec, data, layout, sizes, make
        leaves = pytree.tree_leaves(sample)
        keeps_state = bool(layout.folder and leaves)
        if make and keeps_state:
            make_files(layout.folder, layout.capacity, width(leaves, layout.narrow))
        if make and layout.messages:
            make_files(layout.messages, *messages)
        self.rows = RowFiles(layout, sample) if keeps_state else None
        self.reading, self.writing = os.pipe()  # wakes the thread that serves the workers
        os.set_blocking(self.reading, False)
        self.requests: deque[Add | Drop] = deque()
        self.closed = threading.Event()
        # What follows belongs to the thread that serves the workers.
        self.version = -1  # of the phase, which is that of its broadcast
        self.log: list[str] = []
        self.early: list[Add] = []  # tasks that came before their phase has begun
        self.outcomes: list[TaskResult | Failure] = []  # that were not sent yet
        self.unfinished = self.left = 0  # tasks of the phase that are without an outcome; see `Add`

    # --- the workers ------------------------------------------------------------------------------------------------
    def start(self, worker_requests: Sequence[WorkerRequest], address: Address, name: int) -> None:
        """Connect to the driver, start the workers and wait for them. name: of this agent. Raises WorkersLost."""
        try:
            self.link = Link.to(address, name)
        except (OSError, EOFError) as error:
            raise WorkersLost(
                f"engine.port: the driver at {address.host}, port {address.port}, cannot be reached from this node "
                f"({error}); let the nodes connect to each other, or set engine.port to a port that is open"
            ) from None
        hooks = Hooks(self._check, self.log.append)
        self.pool = WorkerPool(self.run_spec, self.data, self.layout, hooks, worker_requests, sizes=self.sizes)
        self.thread = threading.Thread(target=self._serve, name="workers", daemon=True)
        self.thread.start()
        threading.Thread(target=self._listen, name="driver", daemon=True).start()

    def _check(self) -> None:
        """The pool's check while it waits: it does nothing, because the driver ends an agent by killing it."""

    def _listen(self) -> None:
        """The thread that takes the driver's messages, also while the other thread sends, so that neither side waits
        for the other one for ever."""
        with suppress(OSError, EOFError):
            while True:
                self._ask(self.link.receive())

    def add(self, add: Add, *moved: int) -> None:
        """Have the workers run these tasks of a phase, which has perhaps not begun yet. moved: results of `write`, for
        which Ray waits, so that the rows that the tasks read are on this node."""
        self._ask(add)

    def _ask(self, request: Add | Drop) -> None:
        self.requests.append(request)
        os.write(self.writing, b"\n")

    def drop(self) -> None:
        """Give up the phase, and wait until the workers are idle."""
        request = Drop(threading.Event())
        self._ask(request)
        request.done.wait()

    def _serve(self) -> None:
        """The thread of the workers: do what the driver asks, add up results, send news."""
        try:
            while not self.closed.is_set():
                self.pool.listen(self.reading)
                with suppress(BlockingIOError):  # emptied first: a later request writes again
                    os.read(self.reading, 1 << 16)
                while self.requests:
                    self._do(self.requests.popleft())
                self._add_up(list(self.pool.take()))
                self._tell()
        except OSError as error:
            if not self.closed.is_set():
                self._end(error)
        except Exception as error:
            self._end(error)

    def _do(self, request: Add | Drop) -> None:
        if isinstance(request, Drop):
            self.pool.drop()
            self.version = -1
            request.done.set()
            return
        if request.begin is not None:
            self._begin(request.version, request.begin)
        if request.version > self.version:
            self.early.append(request)
        elif request.version == self.version:
            tasks, self.left = request.tasks, request.left
            self.unfinished += len(tasks)
            # Workers report when an order is finished. The last tasks form a separate order, so that the driver gets
            # the other results, and sends new tasks, while the last ones run.
            last = min(len(tasks), AHEAD * len(self.pool.workers))
            for part in (tasks[: len(tasks) - last], tasks[len(tasks) - last :]):
                if part:
                    self.pool.add(part)
        if request.begin is not None:
            early, self.early = self.early, []
            for each in early:
                self._do(each)

    def _begin(self, version: int, begin: Begin) -> None:
        """Tasks of the phase before that are still under way are finished, and their results are dropped."""
        self.pool.drop()
        self.outcomes.clear()
        self.unfinished = 0
        self.reducer, self.with_sums = TreeReducer(begin.shape, add_leaves), begin.with_sums
        self.version = version
        self.pool.begin(begin.call, Broadcast(version, begin.leaves))

    def _add_up(self, finished: Sequence[Finished]) -> None:
        """Add up the sums of the results, and keep everything else for the driver."""
        for each in finished:
            outcome = each.outcome
            if isinstance(outcome, TaskResult) and outcome.leaves:
                if self.with_sums:
                    outcome = outcome._replace(leaves=[np.array(leaf) for leaf in outcome.leaves])
                else:
                    self.reducer.put(self.reducer.shape.node_of(outcome), outcome.leaves)
                    outcome = outcome._replace(leaves=None)
            self.outcomes.append(outcome)
        # Sums that were not added to others yet are still in the memory of the workers, which is used again.
        for at, leaves in self.reducer.parts.items() if finished else ():
            self.reducer.parts[at] = [leaf if leaf.flags.owndata else np.array(leaf) for leaf in leaves]
        for each in finished:
            self.pool.release(each)
        self.unfinished -= len(finished)

    def _tell(self) -> None:
        """Send the driver what it should know by now."""
        few = self.unfinished <= self.left or any(isinstance(outcome, Failure) for outcome in self.outcomes)
        due = bool(self.outcomes) and few and not self.requests
        if not due and not self.log:
            return
        lines, self.log[:] = list(self.log), []
        outcomes, sums = [], []
        if due:
            outcomes, self.outcomes = self.outcomes, []
            if not self.unfinished:
                sums = [PartialSum(*item) for item in self.reducer.parts.items()]
                self.reducer.parts.clear()
        self.link.send(News(self.version, lines, outcomes, len(self.pool.workers), sums))

    def _end(self, error: Exception) -> None:
        """Tell the driver why this agent cannot go on."""
        try:
            pickle.dumps(error)
        except Exception:
            error = WorkersLost(type_and_first_line(error))
        with suppress(OSError):
            self.link.send(News(self.version, self.log, [], 0, [], error))

    # --- the rows ---------------------------------------------------------------------------------------------------
    def read(self, rows: np.ndarray) -> np.ndarray:
        """(c, bytes of a row) uint8: client states as they are stored, for another node."""
        assert self.rows is not None
        return self.rows.packed(rows)

    def write(self, rows: np.ndarray, packed: np.ndarray) -> int:
        """Store what another node's `read` returned. Returns the number of bytes."""
        assert self.rows is not None
        self.rows.unpack(rows, packed)
        return packed.nbytes

    def read_messages(self, rows: np.ndarray, width: int) -> np.ndarray:
        """(c, width) uint8: the messages in some rows, for the driver's node. width: bytes of a message."""
        return read_rows(self.layout.messages, rows, width)

    def lines(self) -> list[str]:
        """The lines for the log of an agent whose workers could not start, and which therefore sends no news."""
        return self.log

    def answers(self) -> bool:
        """Whether the agent is alive."""
        return True

    def until_closed(self) -> None:
        """Return when the agent is closed. Before that, an error of Ray means that the agent or its node is gone."""
        self.closed.wait()

    def close(self) -> None:
        """Stop the workers, and remove the files that were made here."""
        self.closed.set()
        if hasattr(self, "thread"):
            self.link.close()
            os.write(self.writing, b"\n")
            self.thread.join()
            self.pool.close()
        for folder in (self.layout.folder, self.layout.messages):
            if self.mine and folder:
                remove_files(folder)

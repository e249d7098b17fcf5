"""The agent of a node of a cluster: it has the node's rows of client states, its workers, and the sums of their
results. The driver gives an agent tasks and gets news of their results. The sums stay with the agent, which adds
neighbours in the tree as they come, until the driver takes the remaining sums at the end of the phase.
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

from ...aggregation.message_rows import read_rows, write_rows
from ...clients.worker import keep_freed_memory
from ...cohorts.tasks import Broadcast
from ...config.run_spec import RunSpec
from ...reduction.tree import Leaves, PartialSum, TaskResult, TreeReducer, TreeShape, add_leaves
from ...state.row_files import RowFiles, StateLayout, make_files, remove_files, width
from ..base import Call, Failure
from .pieces import cut, from_arguments
from .scheduler import AHEAD
from .worker_pool import Finished, Hooks, WorkerPool, WorkerRequest
from .worker_process import MemorySizes


class News(NamedTuple):
    """An agent's message to the driver: lines for the log, outcomes of tasks, and the number of its workers. pieces:
    how many of the call's other results are the sums of all results of the phase, see `pieces.cut`. It is 0 while tasks
    are under way, if the sums come with the results, and if they need more pieces than the call may return.
    """

    log: list[str]
    outcomes: list[TaskResult | Failure]
    workers: int
    pieces: int = 0


class Begin(NamedTuple):
    """The description of a phase, see Phase."""

    call: Call
    shape: TreeShape
    repeated: bool


class Add(NamedTuple):
    """Tasks of the phase with the number `version`. begin: the phase begins with them."""

    version: int
    tasks: Sequence[Any]
    begin: Begin | None = None


class Until(NamedTuple):
    """When an agent sends its news: as soon as at most `left` tasks are without an outcome or a task has failed, and
    after `seconds` at the latest. room: the largest number of pieces of sums in the news."""

    seconds: float
    left: int
    room: int


class Drop(NamedTuple):
    done: threading.Event


Told = News | tuple[News | bytes, ...]
"""News, followed by `Until.room` pieces of sums if that is not 0."""

Request = tuple[Add, Leaves] | Drop
"""Tasks, and the leaves of the broadcast if a phase begins with these tasks."""


class NodeAgent:
    """A Ray actor. One thread serves the workers, and the driver's calls run in other threads."""

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
        self.version = -1  # of the phase, which is that of its broadcast
        self.changed = threading.Condition()
        self.log: list[str] = []
        self.requests: deque[Request] = deque()
        self.doing = False  # whether requests are just being done
        self.early: list[tuple[Add, Leaves]] = []  # tasks that came before their phase has begun
        self.outcomes: deque[TaskResult | Failure] = deque()
        self.unfinished = 0  # tasks of the phase that are without an outcome
        self.error: BaseException | None = None
        self.ended = False

    # --- the workers ------------------------------------------------------------------------------------------------
    def start(self, worker_requests: Sequence[WorkerRequest]) -> str:
        """Start the workers and wait for them. Returns the node's id. Raises WorkersLost."""
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
        """The pool's check while it waits: it does nothing, because the driver ends an agent by killing it."""

    def work(self, add: Add, until: Until, *arguments: Any) -> Told:
        """Do what `add` and `news` do, in one call."""
        self.add(add, *arguments)
        return self.news(add.version, until)

    def add(self, add: Add, *arguments: Any) -> None:
        """Have the workers run these tasks of a phase. Ray may have this run before the phase has begun.

        If a phase begins, tasks of the phase before that are still under way are finished, and their results are
        dropped; the arguments are the leaves of the broadcast, see `pieces.as_arguments`. Otherwise the arguments are
        results of `write`, for which Ray waits, so that the rows that the tasks read are on this node.
        """
        self._ask((add, from_arguments(arguments) if add.begin is not None else []))

    def _ask(self, request: Request) -> None:
        with self.changed:
            if self.error is not None:
                raise self.error
            self.requests.append(request)
        os.write(self.writing, b"\n")

    def news(self, version: int, until: Until) -> Told:
        """The outcomes of a phase since the last call. A driver without further tasks gets the outcomes of all tasks in
        one call."""
        with self.changed:
            self.changed.wait_for(
                lambda: (self.version == version and self._worth_telling(until.left)) or self.error is not None,
                until.seconds,
            )
            if self.error is not None:
                raise self.error
            current = self.version == version
            outcomes = list(self.outcomes) if current else []
            done = current and not self.unfinished and not self.repeated
            pieces = cut(self._parts(), until.room) if done and until.room else None
            news = News(list(self.log), outcomes, len(self.pool.workers), len(pieces or []))
            self.log.clear()
            if current:
                self.outcomes.clear()
        return (news, *(pieces or []), *[b""] * (until.room - news.pieces)) if until.room else news

    def _worth_telling(self, left: int) -> bool:
        if not self.outcomes or self.requests or self.doing:
            return False
        return self.unfinished <= left or any(isinstance(outcome, Failure) for outcome in self.outcomes)

    def lines(self) -> list[str]:
        """The lines for the log that `news` has not returned yet; the driver asks for them when it gives up the
        workers."""
        with self.changed:
            lines, self.log[:] = list(self.log), []
        return lines

    def sums(self) -> list[PartialSum]:
        """The sums of the phase's results, added as far as they are neighbours in the tree."""
        with self.changed:
            return self._parts()

    def _parts(self) -> list[PartialSum]:
        return [PartialSum(*item) for item in self.reducer.parts.items()]

    def drop(self) -> None:
        """Give up the phase, and wait until the workers are idle."""
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
                    self.doing = bool(requests)
                for request in requests:
                    self._do(request)
                with self.changed:
                    self.doing = False
                    self.changed.notify_all()
                finished = list(self.pool.take())
                if finished:
                    self._pass_on(finished)
        except BaseException as error:
            with self.changed:
                self.error = error
                self.changed.notify_all()

    def _do(self, request: Request) -> None:
        if isinstance(request, Drop):
            self.pool.drop()
            self.version = -1
            request.done.set()
            return
        add, leaves = request
        if add.begin is not None:
            self._begin(add.version, add.begin, leaves)
        if add.version > self.version:
            self.early.append(request)
        elif add.version == self.version:
            with self.changed:
                self.unfinished += len(add.tasks)
            # Workers report when an order is finished. The last tasks form a separate order, so that the driver gets
            # the other results, and sends new tasks, while the last ones run.
            last = min(len(add.tasks), AHEAD * len(self.pool.workers))
            for part in (add.tasks[: len(add.tasks) - last], add.tasks[len(add.tasks) - last :]):
                if part:
                    self.pool.add(part)
        if add.begin is not None:
            early, self.early = self.early, []
            for each in early:
                self._do(each)

    def _begin(self, version: int, begin: Begin, leaves: Leaves) -> None:
        self.pool.drop()
        with self.changed:
            self.outcomes.clear()
            self.unfinished = 0
            self.reducer, self.repeated = TreeReducer(begin.shape, add_leaves), begin.repeated
            self.version = version
        self.pool.begin(begin.call, Broadcast(version, leaves))

    def _pass_on(self, finished: Sequence[Finished]) -> None:
        """Add up the sums of the results, and pass everything else to the driver."""
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
            self.unfinished -= len(passed)
            self.changed.notify_all()

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

    def write_messages(self, rows: np.ndarray, packed: np.ndarray) -> int:
        """Store what another node's `read_messages` returned. Returns the number of bytes."""
        return write_rows(self.layout.messages, rows, packed)

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
        for folder in (self.layout.folder, self.layout.messages):
            if self.mine and folder:
                remove_files(folder)

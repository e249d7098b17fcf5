"""The pool of workers on Ray, on one node or on several.

A worker is an actor, and a phase is calls of its method `run`, with the broadcast as a reference to an object. A worker
has two calls at a time. A reply has the outcomes of the call's tasks and their sums, added in the order of the tree, so
that nothing of a phase is lost with a worker but the calls that it had. A worker that dies is replaced, and so is one
that gives no sign of life for `engine.patience` seconds. A worker whose environment cannot run clients is given up.

On several nodes, the states of clients are rows in files of the node that ran their last task. A task is given to a
node that has its rows if there is one; other rows come with the call, as objects. If a node is lost, those of its tasks
in this round whose rows are lost with it run again elsewhere. Rows that a checkpoint names are also on the driver's
node. If some committed rows are on no node, RowsLost sends the driver back to its last checkpoint.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import ray
from ray.exceptions import RayError, RayTaskError
from torch.utils import _pytree as pytree

from ...aggregation.message_rows import vector_leaves, write_rows
from ...aggregation.staged import StagedMessages
from ...cohorts.tasks import TrainingTask
from ...errors import NoRoom, RowsLost, WorkersLost, WorkersUnfit
from ...method_form.state_spec import StateSpec
from ...reduction.tree import Leaves, TaskResult
from ...rounds.pool import Failure, Outcome, Phase, Pool
from ...run_spec import RunSpec
from ...state.row_files import RowFiles
from ...state.row_table import RowTable
from .placement import Placement, cluster, on_node, placed, wanted
from .row_locations import DRIVER, RowLocations
from .scheduler import CALL_SECONDS, IN_FLIGHT, Key, Pace, Scheduler, Waiting, key_of, rows_read
from .shared_sums import FilesOfWorker
from .task_splitting import split_tasks
from .worker_handle import (
    WorkerCall,
    WorkerHandle,
    WorkerRequest,
    death,
    death_at_start,
    last_error_line,
    start_seconds,
    why_unfit,
)
from .worker_process import Order, StateFiles

LOOK_SECONDS = 0.5
"""How often workers are asked for a sign of life, and whether the run shall stop."""
NODES_SECONDS = 1.0
"""The time between two looks at the nodes of the cluster. A look costs some milliseconds."""
CLOSE_SECONDS = 10.0
"""The time in which the files on other nodes must be removed."""
DEATHS = 20
"""If this many workers are lost in a row, with no task done in between, the run is given up."""
STARTS = 3
"""If this many processes of one worker die in a row while they start, that worker is given up."""
BROADCASTS = 8
"""The most sets of leaves that are kept for workers that lack them. In an asynchronous run they come one by one."""
SENT_BYTES = 1 << 22
"""The most bytes of leaves that come with the calls on one node, counted over all workers. More are an object, which
costs a millisecond, and about another one for each worker that reads it."""
ROWS_AT_ONCE = 256
"""The number of rows that are copied to the driver's node at a time."""


class Hooks(NamedTuple):
    """check: called while waiting; it may raise an exception to stop the run. log: log callback."""

    check: Callable[[], None]
    log: Callable[[str], None]


class RayPool(Pool):
    """Workers on Ray."""

    def __init__(
        self,
        run_spec: RunSpec,
        data: Sequence[Any],
        table: RowTable,
        hooks: Hooks,
        steps: np.ndarray,
        requests: Sequence[WorkerRequest],
        placement: Placement | None = None,
        several: bool = False,
    ) -> None:
        """Start a worker for each request, and wait for them.

        data: references to training set, test set, client index and frozen tensors. table: its committed rows must not
        be lost. steps: (N,) local steps of each client in a round. placement: the reserved resources, which `close`
        gives back. several: whether workers may be on any node of a cluster, also on nodes that join later.
        """
        self.run_spec, self.data, self.table, self.hooks = run_spec, data, table, hooks
        self.placement, self.several, self.engine = placement, several, run_spec.experiment.engine
        self.home = ray.get_runtime_context().get_node_id()
        method, x = run_spec.method(), run_spec.initial_model()
        sample = StateSpec(method, x).client
        messages = run_spec.stage_plan.row_files(method, x) if table.layout.messages else (0, 0)
        self.files = StateFiles(table.layout, self.home, sample, messages)
        keeps_state = bool(table.layout.folder and pytree.tree_leaves(sample))
        self.rows = RowFiles(table.layout, sample) if keeps_state else None  # of the driver's node
        self.locations = RowLocations(table.capacity)
        self.scheduler = Scheduler(self.locations, steps)
        self.nodes = {self.home: DRIVER}  # Ray's id of a node -> its number
        self.workers: list[WorkerHandle] = []  # that are starting or have started
        self.unfit: list[WorkerHandle] = []  # that were given up; they still read rows for others
        self.made = self.deaths = 0
        self.phase: Phase | None = None
        self.calls: dict[Any, WorkerCall] = {}  # by the reference to the reply
        self.pace: dict[Any, np.ndarray] = defaultdict(lambda: np.zeros(3))  # (call, group) -> steps, tasks, seconds
        self.done: dict[Key, tuple[Any, int]] = {}  # tasks of the phase with a result, and the nodes with their states
        self.earlier: dict[Key, tuple[Any, int]] = {}  # the same of the round's earlier phases
        self.broadcasts: dict[tuple[int, ...], tuple[Leaves, Any]] = {}  # ids of leaves -> leaves, their reference
        self.looked = self.looked_at_nodes = time.monotonic()
        self.here: tuple[bool, StagedMessages] | None = None  # for passes by the driver, with whether of the warm start
        self.counts = dict.fromkeys(("rows", "results", "sums", "bytes"), 0)  # since the last call of `facts`
        table.fetch_rows, table.on_grown = self.gather, self.locations.grow
        table.on_restored = lambda rows: self.locations.wrote(DRIVER, rows)
        try:
            for request in requests:
                self._start_worker(request)
            self._wait_for_first()
        except BaseException:
            self.close()
            raise

    # --- workers that start -------------------------------------------------------------------------------------------
    def _start_worker(self, request: WorkerRequest, tries: int = 0) -> None:
        given = [self.run_spec.without_frozen().for_worker(request.group.gpus), *self.data]
        worker = WorkerHandle.of(given, self.files, request, self.made, tries)
        worker.node = self._number_of(request.node)
        self.made += 1
        self.workers.append(worker)

    @property
    def coming(self) -> list[WorkerHandle]:
        return [worker for worker in self.workers if worker.started is None]

    def _wait_for_first(self) -> None:
        limit = self.engine.wait + start_seconds(self.run_spec.kernels.compiled)
        end = time.monotonic() + limit
        while self.coming:
            self._welcome(LOOK_SECONDS)
            self.hooks.check()
            if self.coming and time.monotonic() > end:
                worker = self.coming[0]
                needs = ", ".join(f"{amount:g} {name}" for name, amount in worker.request.group.needs().items())
                raise NoRoom(
                    f"engine.workers: worker {worker.number} has not started within {limit:g} s, it waits for {needs} "
                    "or for its process; lower engine.workers, or raise engine.wait"
                )
        if self.several:
            self.hooks.log(f"{len(self.workers)} workers on {len({worker.node for worker in self.workers})} nodes")

    def _welcome(self, seconds: float) -> None:
        """Take note of the workers that have started, or have died as they started; waits for the first one."""
        starts = {worker.start: worker for worker in self.coming}
        if not starts:
            return
        ray.wait(list(starts), timeout=seconds)
        for start in ray.wait(list(starts), num_returns=len(starts), timeout=0)[0]:
            worker = starts[start]
            try:
                self._joins(worker, ray.get(start))
            except RayError as error:
                self._died_starting(worker, error)

    def _joins(self, worker: WorkerHandle, started: Any) -> None:
        worker.started = started
        worker.lives()
        worker.node = self._number_of(started.node)
        if worker.node == DRIVER:
            worker.sum_files = FilesOfWorker(started.process, started.sum_files)
        else:
            worker.host = next((node.name for node in cluster() if node.id == started.node), started.node[:8])

    def _number_of(self, node: str) -> int:
        """The number of a node, by Ray's id of it."""
        if node not in self.nodes:
            self.nodes[node] = self.locations.add()
        return self.nodes[node]

    def _died_starting(self, worker: WorkerHandle, error: RayError) -> None:
        """Start another process in the worker's place, or give the worker up: because its environment is the reason, or
        because too many processes died in a row."""
        if worker.node != DRIVER and self._node_is_gone(worker, error):
            self._lost_node(worker.node)
            return
        cause = why_unfit(error)
        if not cause:
            cause = death_at_start(error, self.run_spec.memory_remedy())
            self.hooks.log(f"{worker.name} died as it started: {cause}")
            if worker.tries + 1 < STARTS:
                self.workers.remove(worker)
                ray.kill(worker.actor)
                self._start_worker(worker.request, worker.tries + 1)
                return
            cause = f"{STARTS} workers in a row died as they started, the last: {cause}"
        self._give_up(worker, cause)

    def _give_up(self, worker: WorkerHandle, cause: str) -> None:
        """Go on without a worker whose environment cannot run clients. Raises WorkersUnfit if it was the last one."""
        self.hooks.log(f"{worker.name} is given up, it cannot run clients: {cause}")
        self.workers.remove(worker)
        self.unfit.append(worker)
        self._take_back(worker)
        if not self.workers and self.several:
            self._look_at_nodes()
        if not self.workers:
            raise WorkersUnfit(f"no worker is left that can run clients, the last: {cause}")

    # --- phases -------------------------------------------------------------------------------------------------------
    def run_phase(self, phase: Phase) -> Iterator[Outcome]:
        if phase.call == "aggregate" and not any(worker.node == DRIVER for worker in self.workers):
            return self._pass_here(phase)
        self._drop()  # what is left of a phase that was given up
        if not phase.repeated:
            self.earlier.clear()
            self.broadcasts.clear()
        self.phase = phase
        for pace in self.pace.values():
            pace /= 2  # the first tasks of a run are slow, and must not count for long
        split = self.several and phase.shape is not None  # the sums of a task's branches are added by the pool
        for task in split_tasks(phase.tasks, len(self.workers), self.scheduler.steps) if split else phase.tasks:
            self.scheduler.put(task, alone=phase.repeated)
        self._hand_out(phase)
        return self._outcomes(phase)

    def _outcomes(self, phase: Phase) -> Iterator[Outcome]:
        self._ask_for_more(phase)
        while self.calls or len(self.scheduler):
            for call in self._ended_calls():
                yield from self._outcomes_of(phase, call)
            self._ask_for_more(phase)
        self.earlier.update(self.done)
        if phase.call == "train" and self.table.layout.messages:
            self._gather_messages()
        self.done.clear()

    def _ended_calls(self) -> list[WorkerCall]:
        """The calls that have ended, not all of them at once. Waits for LOOK_SECONDS at most."""
        if not self.workers:
            self._look_at_nodes()
        if not self.workers:
            raise WorkersLost("no worker is left, and no node has room for another")
        coming = self.coming
        ready = ray.wait([*self.calls, *(worker.start for worker in coming)], timeout=LOOK_SECONDS)[0]
        self.hooks.check()
        if coming:
            self._welcome(0.0)
        now = time.monotonic()
        if now > self.looked + LOOK_SECONDS:
            self.looked = now
            self._look_for_hanging()
        if self.several and now > self.looked_at_nodes + NODES_SECONDS:
            self._look_at_nodes()
        ended = [self.calls.pop(answer) for answer in ready if answer in self.calls]
        for call in ended:
            call.worker.calls.remove(call)
        return ended

    def _ask_for_more(self, phase: Phase) -> None:
        """Give the workers their next tasks, and take further tasks of the phase if there are too few."""
        if phase.further is not None:
            free = sum(IN_FLIGHT - len(worker.calls) for worker in self.workers if worker.started is not None)
            lack = free * self._tasks_of_a_call(phase) - len(self.scheduler)
            for task in phase.further(lack) if lack > 0 else ():
                self.scheduler.put(task)
        self._hand_out(phase)

    def _tasks_of_a_call(self, phase: Phase) -> int:
        """About the number of tasks that take CALL_SECONDS."""
        _, tasks, seconds = sum((pace for (call, _), pace in self.pace.items() if call == phase.call), np.zeros(3))
        return math.ceil(CALL_SECONDS * tasks / seconds) if seconds else 1

    def _hand_out(self, phase: Phase) -> None:
        """Give every worker calls until it has IN_FLIGHT of them, first calls first."""
        ready = [worker for worker in self.workers if worker.started is not None]
        if phase.call == "aggregate":  # a pass over messages is run where the messages are
            ready = [worker for worker in ready if worker.node == DRIVER]
        speeds = {worker: self._speed(phase, worker) for worker in ready}
        ready.sort(key=lambda worker: -speeds[worker])
        for depth in range(IN_FLIGHT):
            for worker in ready:
                if len(worker.calls) == depth and len(self.scheduler):
                    self._give(phase, worker, speeds)

    def _speed(self, phase: Phase, worker: WorkerHandle) -> float:
        """The measured steps per second of a worker of this group; those of the fastest where it was not measured; 0
        where none was."""
        known = {group: pace[0] / pace[2] for (call, group), pace in self.pace.items() if call == phase.call}
        return float(known.get(self._group(worker)) or max(known.values(), default=0.0))

    def _group(self, worker: WorkerHandle) -> int:
        return self.engine.groups().index(worker.request.group)

    def _give(self, phase: Phase, worker: WorkerHandle, speeds: dict[WorkerHandle, float]) -> None:
        """Give a worker its next call if there are tasks for it."""
        pace = Pace(len(speeds), max(speeds.values()), sum(speeds.values()), steps_in(self.calls.values()))
        load, further = steps_in(worker.calls), phase.further is not None
        items = self.scheduler.take(worker.node, speeds[worker], load, pace, further)
        if items:
            self._call(phase, worker, items)

    def _call(self, phase: Phase, worker: WorkerHandle, items: list[Waiting]) -> None:
        moved, packed = [], []
        for item in items:
            for source, rows in self._missing(worker.node, item.task):
                moved.append(rows)
                packed.append(self._read(source, rows))
                self.counts["rows"] += len(rows)
        leaves = phase.broadcast.leaves
        known = [] if moved else worker.leaves  # such a call may never run, and others must not need it
        places = tuple(p for p, leaf in enumerate(leaves) if p >= len(known) or known[p] is not leaf)
        tasks = [item.task for item in items]
        file = None if worker.sum_files is None or phase.shape is None else worker.sum_files.take()
        order = Order(phase.call, tasks, phase.broadcast.version, len(leaves), places, tuple(moved), phase.shape, file)
        call = WorkerCall(worker, items, bool(moved), file)
        call.answer = worker.actor.run.remote(order, self._posted([leaves[place] for place in places]), *packed)
        worker.leaves = worker.leaves if moved else list(leaves)
        if not worker.calls:
            worker.lives()
        worker.calls.append(call)
        self.calls[call.answer] = call

    def _posted(self, leaves: Leaves) -> Any:
        """Leaves of the broadcast for a call, or a reference to them: most workers lack the same leaves."""
        if not self.several and sum(leaf.nbytes for leaf in leaves) * len(self.workers) <= SENT_BYTES:
            return leaves
        key = tuple(map(id, leaves))
        if key not in self.broadcasts:
            while len(self.broadcasts) >= BROADCASTS:
                del self.broadcasts[next(iter(self.broadcasts))]
            self.broadcasts[key] = leaves, ray.put(leaves)
        return self.broadcasts[key][1]

    def _outcomes_of(self, phase: Phase, call: WorkerCall) -> Iterator[Outcome]:
        """The outcomes of a call that has ended."""
        worker = call.worker
        try:
            reply = call.reply()
        except RayTaskError as error:
            cause = error.cause if isinstance(error.cause, Exception) else error
            raise cause from cause.__cause__
        except RayError as error:
            yield from self._broken(call, error)
            return
        worker.lives()
        self.deaths = 0
        ran = call.items[: len(reply.outcomes)]
        self.pace[phase.call, self._group(worker)] += (sum(item.steps for item in ran), len(ran), reply.seconds)
        for item, outcome in zip(call.items, reply.outcomes, strict=False):
            if isinstance(outcome, TaskResult):
                self._note(worker, item.task)
            elif item.for_states:  # it has failed now, and succeeded before
                self.scheduler.put_back([item])
            if not item.for_states:
                yield replace(outcome, task=item.task) if isinstance(outcome, Failure) else outcome
        if not call.items[0].for_states:
            if worker.node != DRIVER:
                self.counts["sums"] += len(reply.sums)
                self.counts["bytes"] += sum(leaf.nbytes for part in reply.sums for leaf in part.leaves)
            yield from reply.sums
        self.scheduler.put_back(call.items[len(reply.outcomes) :])
        if reply.unfit and worker in self.workers:
            self._give_up(worker, reply.unfit)
        elif reply.lost_device:
            self._replace(worker, "it lost its device")

    def _note(self, worker: WorkerHandle, task: Any) -> None:
        """Note which node has the states of a task that has a result."""
        if len(self.nodes) > 1 and isinstance(task, TrainingTask):
            self.counts["results"] += worker.node != DRIVER
            self.done[key_of(task)] = task, worker.node
            self.locations.wrote(worker.node, task.write[task.write >= 0])

    def unfinished(self) -> int:
        return len(self.scheduler) + sum(len(call.items) for call in list(self.calls.values()))

    # --- workers that die or hang -------------------------------------------------------------------------------------
    def _take_back(self, worker: WorkerHandle) -> None:
        """Let the tasks of a worker's calls wait again."""
        for call in reversed(worker.calls):
            self.calls.pop(call.answer, None)
            self.scheduler.put_back(call.items)
        worker.calls.clear()

    def _broken(self, call: WorkerCall, error: RayError) -> Iterator[Outcome]:
        """A call has no reply: its worker has died, or the rows that should come with it cannot come. If it had one
        task, that task has failed; several are tried again one by one."""
        worker, alone = call.worker, [item._replace(alone=True) for item in call.items]
        if worker not in self.workers:
            self.scheduler.put_back(call.items)
        elif call.moves and not worker.is_dead(error):
            self.scheduler.put_back(alone)
            self._look_at_nodes()
        elif worker.node != DRIVER and self._node_is_gone(worker, error):
            self.scheduler.put_back(call.items)
            self._lost_node(worker.node)
        else:
            why = replace(death(error, self.run_spec.memory_remedy()), where=worker.name)
            if worker.hung:
                why = replace(why, cause=f"no step for {self.engine.patience:g} s (engine.patience)", kind="client")
            self._replace(worker, why.cause)
            if len(alone) > 1 or alone[0].for_states:
                self.scheduler.put_back(alone)
            else:
                yield replace(why, task=alone[0].task)

    def _replace(self, worker: WorkerHandle, cause: str) -> None:
        """Start another worker in the place of one that has died or is killed now."""
        self._died(cause)
        self.hooks.log(f"{worker.name}: {cause}; another one starts")
        ray.kill(worker.actor)
        self.workers.remove(worker)
        self._take_back(worker)
        self._start_worker(worker.request)

    def _died(self, cause: str) -> None:
        self.deaths += 1
        if self.deaths > DEATHS:
            raise WorkersLost(f"{self.deaths} workers died in a row without finishing a task, the last: {cause}")

    def _look_for_hanging(self) -> None:
        patience, starting = self.engine.patience, start_seconds(self.run_spec.kernels.compiled)
        for worker in self.workers:
            if worker.started is None and worker.silent_for() > max(patience, starting):
                ray.kill(worker.actor)
            elif worker.calls and worker.silent_for() > patience and not worker.hung:
                self.hooks.log(f"{worker.name} has taken no step for {patience:g} s; its stack:\n{worker.end_hung()}")

    def _drop(self) -> None:
        """Give up the phase, and wait until no worker writes rows."""
        self.phase = None
        while self.calls:
            for call in self._ended_calls():
                try:
                    call.reply()
                except RayTaskError:
                    continue
                except RayError as error:
                    list(self._broken(call, error))
        self.scheduler.clear()
        self.done.clear()

    # --- several nodes ------------------------------------------------------------------------------------------------
    def _look_at_nodes(self) -> None:
        """Find nodes that are gone, and start workers on those that joined."""
        self.looked_at_nodes = time.monotonic()
        there = {node.id for node in cluster()}
        for node, number in list(self.nodes.items()):
            if node not in there:
                self._lost_node(number)
        bad = {worker.request.node for worker in self.unfit}
        fit = [node for node in cluster() if node.id not in bad]
        missing = wanted(self.engine, fit)
        for worker in self.workers:
            if worker.request.group in missing:
                missing.remove(worker.request.group)
        if not missing:
            return
        spots = placed(missing, [node for node in cluster(free=True) if node.id not in bad])[0]
        for name in sorted({node.name for node in fit for spot in spots if spot.node == node.id}):
            self.hooks.log(f"workers start on node {name}")
        for spot in spots:
            self._start_worker(WorkerRequest(spot.group, on_node(spot.node), spot.node))

    def _node_is_gone(self, worker: WorkerHandle, error: RayError) -> bool:
        known = worker.request.node if worker.started is None else worker.started.node
        return "node has died" in str(error) or all(node.id != known for node in cluster())

    def _lost_node(self, number: int) -> None:
        """A node is lost: its tasks go elsewhere. Raises RowsLost if committed rows are lost."""
        gone = [worker for worker in self.workers if worker.node == number]
        lost = next(node for node, each in self.nodes.items() if each == number)
        name = next((worker.host for worker in gone if worker.host), lost[:8])
        self.nodes = {node: each for node, each in self.nodes.items() if each != number}
        self.workers = [worker for worker in self.workers if worker.node != number]
        self.unfit = [worker for worker in self.unfit if worker.node != number]
        given = sum(len(call.items) for worker in gone for call in worker.calls)
        for worker in gone:
            self._take_back(worker)
            ray.kill(worker.actor)
        self._died(f"node {name} is lost")
        self.locations.lose(number)
        again = self._run_again(number) if self.table.layout.folder or self.table.layout.messages else 0
        self.hooks.log(
            f"node {name} is lost: {given} tasks under way go elsewhere, {again} of this round run again for the "
            "states that are lost"
        )
        committed = np.concatenate([self.table.row[self.table.row >= 0], np.array([*self.table.waiting], np.int64)])
        if self.table.layout.folder and len(rows := self.locations.gone(committed)):
            self._drop()
            self.earlier.clear()
            raise RowsLost(f"the states of {len(rows)} clients were lost with node {name}")

    def _run_again(self, number: int) -> int:
        """Let the tasks of this round that a node has run wait again. Returns their number."""
        lost = [key for key, (_, node) in {**self.earlier, **self.done}.items() if node == number]
        for key in lost:
            task, _ = self.done.pop(key, None) or self.earlier.pop(key)
            self.scheduler.put(task, alone=True, for_states=True)
        return len(lost)

    def _missing(self, node: int, task: Any) -> Iterable[tuple[int, np.ndarray]]:
        """[(another node, rows), …]: the rows that a task reads and its node lacks."""
        return self.locations.missing(node, rows_read(task)) if len(self.nodes) > 1 and self.table.layout.folder else ()

    def _read(self, node: int, rows: np.ndarray) -> Any:
        """(c, bytes of a row) uint8: rows (c,) as a node has them, or a reference to them. Raises RowsLost."""
        if node == DRIVER and self.rows is not None:
            return self.rows.packed(rows)
        worker = next((worker for worker in [*self.workers, *self.unfit] if worker.node == node), None)
        if worker is None:
            raise RowsLost(f"the states of {len(rows)} clients were lost with a node")
        return worker.actor.packed.remote(rows)

    def gather(self, rows: np.ndarray) -> None:
        """Copy committed rows to the driver's node, whose files a checkpoint names.

        The checkpoint's thread calls this. The rows are pinned, so nobody writes to them meanwhile.
        """
        if self.rows is None:
            return
        for source, theirs in self.locations.missing(DRIVER, rows):
            for begin in range(0, len(theirs), ROWS_AT_ONCE):
                part = theirs[begin : begin + ROWS_AT_ONCE]
                packed: Any = ray.get(self._read(source, part))
                self.rows.unpack(part, packed)
                self.locations.copied(DRIVER, part)

    # --- messages -----------------------------------------------------------------------------------------------------
    def _gather_messages(self) -> None:
        """Copy the messages of the phase to the driver's node, whose workers do the passes over them."""
        if not self.done:
            return
        round = next(task.round for task, _ in self.done.values())
        width = sum(leaf.numel() * leaf.element_size() for leaf in vector_leaves(self._message_of(round)))
        readers = {worker.node: worker for worker in self.workers}
        try:
            for task, node in self.done.values():
                for begin in range(0, len(task.position) if node != DRIVER else 0, ROWS_AT_ONCE):
                    rows = task.position[begin : begin + ROWS_AT_ONCE]
                    packed: Any = ray.get(readers[node].actor.messages_in.remote(rows, width))
                    write_rows(self.table.layout.messages, rows, packed)
        except (RayError, KeyError) as error:
            self._look_at_nodes()
            raise RowsLost(f"messages of round {round} were lost with a node ({last_error_line(error)})") from error

    def _pass_here(self, phase: Phase) -> Iterator[Outcome]:
        """Run a pass over the messages in the driver itself, if its node has the messages but no worker."""
        round = phase.tasks[0].round
        if self.here is None or self.here[0] != (round == 0):
            staged = StagedMessages(self.run_spec.stage_plan, self._message_of(round), self.table.layout.messages)
            self.here = (round == 0, staged)
        staged = self.here[1]
        assert staged.files is not None
        for task in phase.tasks:
            self.hooks.check()
            yield task.run(staged.files, staged.parts)

    def _message_of(self, round: int) -> Any:
        """A sample of the messages of a round, of which round 0 is the warm start."""
        method, x = self.run_spec.method(), self.run_spec.initial_model()
        algorithm = method.warm_start if round == 0 else method
        assert algorithm is not None
        return StateSpec(algorithm, x).message

    # --- the end ------------------------------------------------------------------------------------------------------
    def facts(self) -> dict[str, float]:
        """The columns that only a run on several nodes has.

        node/count: the number of nodes with workers. node/bytes_moved: the bytes of clients' states that were copied to
        the node of a worker. node/results: the number of tasks that ran on other nodes than the driver's. node/sums:
        the number of sums that came from other nodes. node/bytes_sums: the bytes of these sums."""
        if not self.several:
            return {}
        counts, self.counts = self.counts, dict.fromkeys(self.counts, 0)
        found = {
            "node/count": len({worker.node for worker in self.workers if worker.started is not None}),
            "node/bytes_moved": counts["rows"] * self.table.width,
            "node/results": counts["results"],
            "node/sums": counts["sums"],
            "node/bytes_sums": counts["bytes"],
        }
        return {name: float(value) for name, value in found.items()}

    def close(self) -> None:
        """Stop the workers; one on each other node removes the files there first."""
        everybody = [*self.workers, *self.unfit]
        removed = [
            worker.actor.remove_files.remote()
            for worker in {worker.node: worker for worker in everybody if worker.node > DRIVER}.values()
        ]
        if removed:
            ray.wait(removed, num_returns=len(removed), timeout=CLOSE_SECONDS)
        for worker in everybody:
            ray.kill(worker.actor)
        if self.placement is not None:
            self.placement.leave()


def steps_in(calls: Iterable[WorkerCall]) -> int:
    return sum(item.steps for call in calls for item in call.items)

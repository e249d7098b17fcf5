"""The workers of one node: Ray actors that take their tasks from shared memory, are watched, and are replaced.

The process that has the pool (the driver, or a node's agent) writes the tasks into shared memory and wakes the workers
by a pipe. Workers claim one task after the other, and leave the results in shared memory. A worker that dies is
replaced, and so is a worker that has begun no local step for `engine.patience` seconds; the outcome of the task that it
had claimed is a Failure. A worker whose environment cannot run clients (a package or the kernels are missing there) is
given up instead, and its task runs elsewhere.
"""

from __future__ import annotations

import math
import os
import pickle
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import ray
from ray.exceptions import OutOfMemoryError, RayActorError, RayError, RayTaskError

from ...cohorts.tasks import MOST_TASKS, Broadcast, PackedTasks
from ...config.schema import WorkerGroup
from ...errors import NoRoom, WorkersLost, WorkersUnfit, WorkerUnfit
from ...kernels.library import SECONDS as BUILD_SECONDS
from ...reduction.tree import Leaves, TaskResult
from ...rounds.pool import Call, Failure, Outcome, Phase, Pool
from ...run_spec import RunSpec
from ...state.row_files import StateLayout
from .placement import Placement
from .shared_memory import SharedMemory, nameless
from .wakeup import WakeUp, wait_for
from .worker_process import SIZE_BITS, MemorySizes, Order, Signs, WorkerProcess, memory_sizes, order_address

LOOK_SECONDS = 0.5
"""How often workers are checked for hanging while no result comes."""
DEATHS = 20
"""If this many workers are lost in a row, with no task done in between, the run is given up."""
STARTS = 3
"""If this many processes of one worker die in a row while they start, that worker is given up."""
START_SECONDS = 120.0
"""The seconds that a worker may take to start, if engine.patience is less."""
NUMBERS = 4096
"""The number of places for the workers' signs of life; numbers of workers are used again."""
AHEAD_SECONDS, MOST_AHEAD = 0.02, 16
"""If a phase has more tasks (`Phase.more`), each worker has unclaimed tasks for at least these seconds, but never more
than MOST_AHEAD: the process that has the pool may be busy with something else when a worker ends a task."""
MOST_ORDERS = 8
"""The most orders that a worker has at once."""
MOST_KEPT = MOST_TASKS // 2
"""The most results whose memory the driver may keep beyond the next outcome."""
ORDERS_BYTES = 1 << 24
"""Where the memory of the orders is used again from its begin, if the orders there are done."""


class Hooks(NamedTuple):
    """check: called while waiting; it may raise an exception to stop the run. log: log callback."""

    check: Callable[[], None]
    log: Callable[[str], None]


class WorkerRequest(NamedTuple):
    """The settings with which a worker is started: its group, and Ray's scheduling strategy that says where."""

    group: WorkerGroup
    strategy: Any


@dataclass(eq=False)
class Handle:
    """One worker. pid, end: references to the number of its process and to the error with which it ends. stack: the
    handle of the file for its stack. tries: the number of its processes that died in a row while they started."""

    actor: Any
    number: int
    wakeup: WakeUp
    pid: Any
    end: Any
    stack: int
    worker_request: WorkerRequest
    tries: int = 0

    @property
    def name(self) -> str:
        try:
            return f"worker {self.number}, process {ray.get(self.pid, timeout=0)}"
        except RayError:
            return f"worker {self.number}"

    def started(self, seconds: float) -> bool:
        """Whether it has started; waits for `seconds` at most. Raises RayError if it died while it started."""
        if not ray.wait([self.pid], timeout=seconds)[0]:
            return False
        ray.get(self.pid)
        self.wakeup.taken()
        return True

    def read_stack(self) -> str:
        """The stack of the worker, also while it runs code that is not Python."""
        try:
            os.kill(ray.get(self.pid, timeout=1), signal.SIGUSR1)
        except (OSError, RayError):
            return "(it does not answer)"
        deadline, size = time.monotonic() + 2, -1
        while time.monotonic() < deadline and (size <= 0 or os.fstat(self.stack).st_size != size):
            size = os.fstat(self.stack).st_size
            time.sleep(0.05)
        return os.pread(self.stack, max(size, 0), 0).decode(errors="replace") or "(it does not answer)"

    def kill(self) -> None:
        """End the process now: a worker that goes on writing could spoil a later task."""
        try:
            os.kill(ray.get(self.pid, timeout=1), signal.SIGKILL)
        except (OSError, RayError):
            ray.kill(self.actor)

    def close(self) -> None:
        ray.kill(self.actor)
        os.close(self.stack)
        self.wakeup.close()


@dataclass(frozen=True)
class IssuedOrder:
    """Tasks that workers may claim. number: counts the pool's orders. address: the place of the order in the memory of
    the orders, see `WakeUp.wake`."""

    number: int
    address: int
    slots: tuple[int, ...]

    @property
    def bytes(self) -> tuple[int, int]:
        """The first byte of the order in the memory of the orders, and the one after its last."""
        begin, size = divmod(self.address, 1 << SIZE_BITS)
        return begin, begin + size


class Woken(NamedTuple):
    """A worker that was woken to claim tasks of an order, and the time (time.monotonic)."""

    worker: Handle
    order: IssuedOrder
    at: float


class Finished(NamedTuple):
    """A task that is over. slot: of the shared memory that holds the result's arrays, which `release` gives back."""

    task: Any
    outcome: TaskResult | Failure
    slot: int | None


class WorkerPool(Pool):
    """Workers on the node of the process that makes the pool."""

    takes_more: ClassVar[bool] = True

    def __init__(
        self,
        run_spec: RunSpec,
        data: Sequence[Any],
        layout: StateLayout,
        hooks: Hooks,
        worker_requests: Sequence[WorkerRequest],
        placement: Placement | None = None,
        sizes: MemorySizes | None = None,
    ) -> None:
        """Start a worker for each request, and wait for them.

        data: references to training set, test set and client index. placement: the reserved resources, which `close`
        gives back. sizes: of the shared memory; by default they follow from the run specification.
        """
        self.placement = placement
        self.run_spec, self.data, self.layout, self.hooks = run_spec, data, layout, hooks
        self.beats_handle, self.beats_path = nameless("fedfleet-beats")
        os.ftruncate(self.beats_handle, NUMBERS * 8)
        self.beats = np.memmap(self.beats_path, np.float64, "r+", shape=(NUMBERS,))
        self.orders_handle, self.orders_path = nameless("fedfleet-orders")
        self.orders_end = self.orders_made = 0
        self.posted: list[np.ndarray] = []  # the broadcast as it is in the shared memory
        self.more: Callable[[int], Sequence[Any]] | None = None  # of the phase, see `Phase`
        self.task_seconds = 0.0  # that the last task of local training took
        self.memory = SharedMemory.make(*(sizes or memory_sizes(run_spec)))
        self.made, self.deaths = 0, 0
        self.waiting: deque[Any] = deque()  # tasks that are in no order yet
        self.under_way: dict[int, Any] = {}  # slot -> task
        self.orders: list[IssuedOrder] = []  # those with tasks that may be unclaimed
        self.held: set[int] = set()  # slots whose results may still be read
        self.kept: dict[int, int] = {}  # index of a task -> the slot with its result, which is kept until given back
        self.shown: Finished | None = None  # the last outcome of a phase, until the next one is asked for
        self.working: dict[WakeUp, deque[Woken]] = {}  # the orders that each worker has, the current one first
        self.finished: deque[Finished] = deque()
        self.workers = [self._start_worker(worker_request) for worker_request in worker_requests]
        try:
            for worker in list(self.workers):
                self._wait_for_start(worker)
        except BaseException:
            self.close()
            raise

    # --- starting workers -------------------------------------------------------------------------------------------
    def _start_worker(self, worker_request: WorkerRequest, tries: int = 0) -> Handle:
        number = self.made % NUMBERS
        self.made += 1
        self.beats[number] = time.monotonic()
        stack, path = nameless("fedfleet-stack")
        wakeup = WakeUp()
        signs = Signs(number, self.beats_path, path, wakeup.ends, self.orders_path)
        group = worker_request.group
        options: dict[str, Any] = {"num_cpus": group.cpus, "num_gpus": group.gpus, "resources": group.resources}
        remote: Any = ray.remote(**options, scheduling_strategy=worker_request.strategy)(WorkerProcess)
        on_gpu = group.gpus or not self.run_spec.experiment.engine.on_gpus()
        run_spec = self.run_spec.with_gpus(group.gpus) if on_gpu else self.run_spec.on_cpu()
        actor = remote.remote(run_spec, *self.data, self.layout, signs, self.memory.address)
        return Handle(actor, number, wakeup, actor.ready.remote(), actor.serve.remote(), stack, worker_request, tries)

    def _wait_for_start(self, worker: Handle) -> None:
        """Wait for a first worker. Processes that die as they start are replaced, until the worker is given up."""
        limit = self.run_spec.experiment.engine.wait + start_seconds(self.run_spec)
        end = time.monotonic() + limit
        while True:
            try:
                if worker.started(LOOK_SECONDS):
                    return
            except RayError as error:
                another = self._died_starting(worker, error)
                if another is None:
                    return
                worker = another
            self.hooks.check()
            if time.monotonic() > end:
                needs = ", ".join(f"{amount:g} {name}" for name, amount in worker.worker_request.group.needs().items())
                raise NoRoom(
                    f"engine.workers: worker {worker.number} has not started within {limit:g} s, it waits for {needs} "
                    "or for its process; lower engine.workers, or raise engine.wait"
                )

    def _died_starting(self, worker: Handle, error: RayError) -> Handle | None:
        """Start another process in the worker's place. Returns None if the worker is given up, because its environment
        is the reason, or because too many processes died in a row."""
        cause = why_unfit(error)
        if not cause:
            cause = death_at_start(error, self.run_spec)
            self.hooks.log(f"worker {worker.number} died as it started: {cause}")
            if worker.tries + 1 < STARTS:
                worker.close()
                another = self._start_worker(worker.worker_request, worker.tries + 1)
                self.workers[self.workers.index(worker)] = another
                return another
            cause = f"{STARTS} workers in a row died as they started, the last: {cause}"
        self._give_up(worker, cause)
        return None

    def _give_up(self, worker: Handle, cause: str) -> None:
        """Go on without a worker whose environment cannot run clients. Raises WorkersUnfit if it was the last one."""
        self.hooks.log(f"{worker.name} is given up, it cannot run clients: {cause}")
        self.working.pop(worker.wakeup, None)
        self.workers.remove(worker)
        worker.close()
        if not self.workers:
            raise WorkersUnfit(f"no worker is left that can run clients, the last: {cause}")

    # --- phases -----------------------------------------------------------------------------------------------------
    def run_phase(self, phase: Phase) -> Iterator[Outcome]:
        self.begin(phase.call, phase.broadcast, release=not phase.repeated)
        self.more = phase.more
        self.add(phase.tasks)
        return self._outcomes(phase.repeated or phase.with_sums, phase.broadcast.leaves)

    def _outcomes(self, release: bool, leaves: Sequence[np.ndarray] = ()) -> Iterator[Outcome]:
        """The outcomes of a phase. release: whether the memory of a result may be used again when the next outcome is
        asked for. leaves: of the broadcast."""
        self._ask_for_more(leaves)
        while self.busy:
            for finished in self.take():
                self.shown = finished
                yield finished.outcome
                self.shown = None
                if release and finished.slot not in self.kept.values():
                    self.release(finished)
                self._ask_for_more(leaves)
            if self.waiting or self.under_way:  # otherwise nothing will come, and listening would only cost time
                self.listen()
                self._ask_for_more(leaves)

    def _ask_for_more(self, leaves: Sequence[np.ndarray]) -> None:
        """Take more tasks of the phase if the workers would soon be without one."""
        if self.more is None:
            return
        each = min(MOST_AHEAD, math.ceil(AHEAD_SECONDS / self.task_seconds)) if self.task_seconds else 1
        ahead, unclaimed = each * len(self.workers), self.memory.unclaimed() + len(self.waiting)
        room = MOST_TASKS - len(self.under_way) - len(self.held) - len(self.waiting)
        if unclaimed > ahead or room <= 0:
            return
        tasks = self.more(min(2 * ahead - unclaimed, room))
        if tasks:
            self.specs = self.memory.post_changes(leaves, self.posted)
            self.posted = list(leaves)
            self.add(tasks)

    def begin(self, call: Call, broadcast: Broadcast, release: bool = True) -> None:
        """Begin a phase, after all outcomes of the one before. release: whether the memory of the earlier results may
        be used again."""
        while self.working:  # workers with the last results have yet to report that they found no more tasks
            self.listen()
        self.call: Call = call
        self.version = broadcast.version
        if release:
            self.held.clear()
            self.kept.clear()
        self.orders_end = 0
        self.more = None
        self.specs, self.posted = self.memory.post(broadcast.leaves), list(broadcast.leaves)

    def add(self, tasks: Sequence[Any]) -> None:
        """Have the workers run these tasks too."""
        self.waiting.extend(tasks)
        self._issue()

    def unfinished(self) -> int:
        return len(self.waiting) + len(self.under_way)

    @property
    def busy(self) -> bool:
        """Whether there are tasks whose outcome has not been taken."""
        return bool(self.waiting or self.under_way or self.finished)

    def take(self) -> Iterator[Finished]:
        """The outcomes that have come, each once."""
        while self.finished:
            yield self.finished.popleft()

    def release(self, finished: Finished) -> None:
        """Allow the memory of this result's arrays to be used again."""
        self.held.discard(-1 if finished.slot is None else finished.slot)

    def listen(self, also: int | None = None) -> None:
        """Wait until a worker reports something, for LOOK_SECONDS at most, and take the results that are there.

        also: a further handle; something to be read from it ends the waiting.
        """
        ready = wait_for(self.working, LOOK_SECONDS, also)
        self.hooks.check()
        if ready is None:
            self._look_for_hanging()
        for wakeup in ready or ():
            if wakeup in self.working:  # otherwise its worker was given up in the meantime
                self._returned(wakeup)
        self._collect()
        self._issue()

    def _issue(self) -> None:
        """Write an order of the waiting tasks, as many as there is memory for results, and wake the idle workers."""
        free = [slot for slot in range(MOST_TASKS) if slot not in self.held and slot not in self.under_way]
        count = min(len(free), len(self.waiting))
        if not count:
            return
        tasks, slots = [self.waiting.popleft() for _ in range(count)], tuple(free[:count])
        self.under_way.update(zip(slots, tasks, strict=True))
        number, self.orders_made = self.orders_made, self.orders_made + 1
        self.memory.open(slots, number)
        packed = PackedTasks.of(tasks) if self.call == "train" else tasks
        order = pickle.dumps(Order(number, self.call, slots, packed, self.version, self.specs), protocol=5)
        begin = self._place_of_order(len(order))
        os.pwrite(self.orders_handle, order, begin)
        issued = IssuedOrder(number, order_address(begin, len(order)), slots)
        self.orders_end = begin + len(order)
        self.orders.append(issued)
        idle = [worker for worker in self.workers if worker.wakeup not in self.working]
        for worker in idle[:count]:
            self._wake(worker, issued)
        if self.more is not None:  # the others go on with this order without waiting for an answer
            for worker in self.workers:
                if worker not in idle and len(self.working[worker.wakeup]) < MOST_ORDERS:
                    self._wake(worker, issued)

    def _place_of_order(self, size: int) -> int:
        """The first byte of an order of `size` bytes: behind the last one or at the begin of the memory, but never over
        an order that a worker may still read."""
        begin = self.orders_end if self.orders_end < ORDERS_BYTES else 0
        held = {woken.order.bytes for orders in self.working.values() for woken in orders}
        for first, end in sorted(held | {order.bytes for order in self.orders}):
            if first < begin + size and begin < end:
                begin = end
        return begin

    def _wake(self, worker: Handle, order: IssuedOrder) -> None:
        worker.wakeup.wake(order.address)
        self.working.setdefault(worker.wakeup, deque()).append(Woken(worker, order, time.monotonic()))

    def _collect(self) -> None:
        """Take the finished results out of the shared memory."""
        unfit: list[Failure] = []
        for slot, task in list(self.under_way.items()):
            found = self.memory.get(slot)
            if found is None:
                continue
            reply, leaves = found
            del self.under_way[slot]
            if isinstance(reply, Failure) and reply.kind == "worker":
                unfit.append(reply)
                self.waiting.append(task)
                continue
            self.deaths = 0
            if isinstance(reply, TaskResult):
                self.task_seconds = reply.facts.get("seconds", self.task_seconds)
                if leaves:
                    self.held.add(slot)
                self.finished.append(Finished(task, reply._replace(leaves=leaves), slot if leaves else None))
            else:
                self.finished.append(Finished(task, replace(reply, task=task), None))
        for reply in unfit:
            for worker in [worker for worker in self.workers if worker.number == reply.worker]:
                self._give_up(worker, reply.cause)

    def _returned(self, wakeup: WakeUp) -> None:
        """A worker has found nothing more to claim in its order, or is gone."""
        woken = self.working[wakeup].popleft()
        if wakeup.answer():
            if woken.order in self.orders:
                self.orders.remove(woken.order)
            if not self.working[wakeup]:
                del self.working[wakeup]
                if self.orders:
                    self._wake(woken.worker, self.orders[0])
            return
        del self.working[wakeup]
        try:
            ray.get(woken.worker.end)
        except RayTaskError as error:
            cause = error.cause if isinstance(error.cause, Exception) else error
            raise cause from cause.__cause__
        except RayError as error:
            self._lost(woken.worker, death(error, self.run_spec))

    def keep(self, result: TaskResult) -> Leaves:
        shown = self.shown
        if len(self.kept) >= MOST_KEPT or shown is None or shown.slot is None or result is not shown.outcome:
            return super().keep(result)
        self.kept[result.index] = shown.slot
        return result.leaves or []

    def give_back(self, index: int) -> None:
        self.held.discard(self.kept.pop(index, -1))

    # --- workers that die or hang -----------------------------------------------------------------------------------
    def _lost(self, worker: Handle, why: Failure) -> None:
        """Replace a worker; the task that it had claimed has failed."""
        name, cause = worker.name, why.cause
        self.deaths += 1
        if self.deaths > DEATHS:
            raise WorkersLost(f"{self.deaths} workers died in a row without finishing a task, the last: {cause}")
        self.hooks.log(f"{name}: {cause}; another one starts")
        worker.close()
        another = self._start_worker(worker.worker_request)
        self.workers[self.workers.index(worker)] = another
        self._collect()
        for slot, task in list(self.under_way.items()):
            if self.memory.claimed_by(slot) == worker.number:
                del self.under_way[slot]
                self.finished.append(Finished(task, replace(why, task=task, where=name), None))
        if self.orders:
            self._wake(another, self.orders[0])

    def _look_for_hanging(self) -> None:
        patience = self.run_spec.experiment.engine.patience
        for woken in [orders[0] for orders in self.working.values()]:
            worker = woken.worker
            last = max(float(self.beats[worker.number]), woken.at)
            try:
                limit = patience if worker.started(0) else max(patience, start_seconds(self.run_spec))
            except RayError as error:
                self.working.pop(worker.wakeup)
                another = self._died_starting(worker, error)
                if another is not None and self.orders:
                    self._wake(another, self.orders[0])
                continue
            if time.monotonic() - last > limit:
                self.hooks.log(f"{worker.name} has taken no step for {patience:g} s; its stack:\n{worker.read_stack()}")
                self.working.pop(worker.wakeup)
                worker.kill()
                self._lost(worker, Failure(None, f"no step for {patience:g} s (engine.patience)", ""))

    def drop(self) -> None:
        """Give up the phase: the workers finish their current tasks, and the results are dropped."""
        self.waiting.clear()
        for order in self.orders:
            self.memory.withdraw(order.slots, order.number)
        self.orders.clear()
        while self.working:
            self.listen()
        self.under_way.clear()
        self.finished.clear()
        self.held.clear()
        self.kept.clear()

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        os.close(self.beats_handle)
        os.close(self.orders_handle)
        self.memory.close()
        if self.placement is not None:
            self.placement.leave()


def start_seconds(run_spec: RunSpec) -> float:
    """The seconds that a worker may take to start; it may have to build the kernels."""
    return START_SECONDS + (BUILD_SECONDS if run_spec.kernels.compiled else 0.0)


def why_unfit(error: Exception) -> str:
    """Why no other process could start there either, from the error with which a worker's start ended; "" if the worker
    was killed or its node is gone."""
    if isinstance(error, RayTaskError) and isinstance(error.cause, WorkerUnfit):
        return str(error.cause)
    return last_error_line(error) if isinstance(error, RayActorError) and error.actor_init_failed else ""


def death(error: Exception, run_spec: RunSpec) -> Failure:
    """The failure for the death of a worker, as Ray reports it, with the remedy if memory may be the reason."""
    if isinstance(error, OutOfMemoryError):
        cause = "the worker died: Ray ended it, because its machine's memory ran out"
        return Failure(None, cause, "", kind="memory")
    cause = f"the worker died: {type(error).__name__}"
    if any(word in str(error) for word in ("OOM", "SIGKILL", "crashed")):
        cause += (
            f" (it crashed or was killed, as the kernel does where memory runs out: then, {run_spec.memory_remedy()})"
        )
    return Failure(None, cause, "")


def death_at_start(error: Exception, run_spec: RunSpec) -> str:
    """Why a worker died that had no task yet, for a log."""
    found = death(error, run_spec)
    return (
        f"{found.cause}; {run_spec.memory_remedy()}"
        if found.kind == "memory"
        else f"{found.cause}, {last_error_line(error)}"
    )


def last_error_line(error: Exception) -> str:
    """The last line of an error of Ray, which has the cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1][:300]}" if lines else type(error).__name__

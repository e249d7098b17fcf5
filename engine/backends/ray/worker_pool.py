"""Client workers as Ray actors: they pull tasks, are watched, and replaced when they die or hang."""

from __future__ import annotations

import os
import pickle
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError, RayTaskError

from ...cohorts.tasks import MOST_TASKS, Broadcast, PackedTasks
from ...config.run_spec import RunSpec
from ...config.schema import WorkerGroup
from ...errors import NoRoom, WorkersLost
from ...kernels.library import SECONDS as BUILD_SECONDS
from ...reduction.tree import PartialSum, TaskResult
from ...state.row_files import StateLayout
from ..base import Call, Failure
from .connect import here
from .placement import Room
from .shared_memory import Board, nameless
from .wakeup import Bell, over
from .worker_handle import Seat, death, death_at_start, why_unfit
from .worker_process import HostProcess, Order, Signs, board_sizes, slot_of

LOOK_SECONDS = 0.5
"""How often workers are looked at while nothing comes."""
DEATHS = 20
"""Workers lost in a row, with no task done in between, before the run is given up."""
STARTS = 3
"""Processes that may die in a row as they start in one worker's place, before that worker is given up."""
START_SECONDS = 120.0
"""What a worker may take to start, where engine.patience is less."""
SEATS = 4096
Calls = tuple[Callable[[], None], Callable[[str], None]]


def start_seconds(run_spec: RunSpec) -> float:
    """What a worker may take to start: it may have to build the kernels."""
    return START_SECONDS + (BUILD_SECONDS if run_spec.kernels != "torch" else 0.0)


class RayFleet:
    """calls: (check, called while waiting, may raise to stop; tell, is told what a log should have)."""

    def __init__(
        self, run_spec: RunSpec, data: Sequence[Any], place: StateLayout, calls: Calls, room: Room | None = None
    ) -> None:
        """room: on a cluster that was there before, what has been taken of it."""
        self.run_spec, self.data, self.place, self.room = run_spec, data, place, room
        self.check, self.tell = calls
        self.handle, self.path = nameless("fedfleet-beats")
        os.ftruncate(self.handle, SEATS * 8)
        self.beats = np.memmap(self.path, np.float64, "r+", shape=(SEATS,))
        self.orders, self.orders_path = nameless("fedfleet-orders")
        self.board = Board.make(*board_sizes(run_spec))
        self.made, self.deaths = 0, 0
        groups = [group for group in run_spec.experiment.engine.groups() for _ in range(group.count)]
        self.seats = [self._seat(group, bundle) for bundle, group in enumerate(groups)]
        self.waiting: deque[Any] = deque()
        self.batch: list[Any] = []  # tasks under way
        self.working: dict[Bell, Seat] = {}  # who works on the batch
        self.began = 0.0
        self.over: deque[tuple[Any, TaskResult | Failure]] = deque()
        try:
            for seat in list(self.seats):
                self._started(seat)
        except BaseException:
            self.close()
            raise

    def _seat(self, group: WorkerGroup, bundle: int, tries: int = 0) -> Seat:
        number = self.made % SEATS
        self.made += 1
        self.beats[number] = time.monotonic()
        stack, path = nameless("fedfleet-stack")
        bell = Bell()
        signs = Signs(number, self.path, path, bell.ends, self.orders_path)
        where = self.room.of(bundle) if self.room else here()
        options: dict[str, Any] = {"num_cpus": group.cpus, "num_gpus": group.gpus, "resources": group.resources}
        made: Any = ray.remote(**options, scheduling_strategy=where)(HostProcess)
        run_spec = (
            self.run_spec if group.gpus or not self.run_spec.experiment.engine.on_gpus() else self.run_spec.on_cpu()
        )
        actor = made.remote(run_spec, *self.data, self.place, signs, self.board.address)
        return Seat(actor, number, bell, actor.ready.remote(), actor.serve.remote(), stack, group, bundle, tries)

    def _started(self, seat: Seat) -> None:
        """Wait for a first worker; some may die on the way, and it may be given up."""
        limit = self.run_spec.experiment.engine.wait + start_seconds(self.run_spec)
        end = time.monotonic() + limit
        while True:
            try:
                if seat.up(LOOK_SECONDS):
                    return
            except RayError as error:
                another = self._died_starting(seat, error)
                if another is None:
                    return
                seat = another
            self.check()
            if time.monotonic() > end:
                needs = ", ".join(f"{amount:g} {name}" for name, amount in seat.group.needs().items())
                raise NoRoom(
                    f"engine.workers: worker {seat.number} has not started within {limit:g} s, it waits for {needs} "
                    "or for its process; lower engine.workers, or raise engine.wait"
                )

    def _died_starting(self, seat: Seat, error: RayError) -> Seat | None:
        """Another process in its place; None where the worker is given up: the reason is of its environment, or too
        many have died so."""
        cause = why_unfit(error)
        if not cause:
            cause = death_at_start(error, self.run_spec)
            self.tell(f"worker {seat.number} died as it started: {cause}")
            if seat.tries + 1 < STARTS:
                seat.leave()
                another = self._seat(seat.group, seat.bundle, seat.tries + 1)
                self.seats[self.seats.index(seat)] = another
                return another
            cause = f"{STARTS} workers in a row died as they started, the last: {cause}"
        self._retire(seat, cause)
        return None

    def _retire(self, seat: Seat, cause: str) -> None:
        """Go on without a worker, whose environment is to blame and no client. HostsLost where it was the last."""
        self.tell(f"{seat.name} is given up, it cannot run clients: {cause}")
        self.working.pop(seat.bell, None)
        self.seats.remove(seat)
        seat.leave()
        if not self.seats:
            raise WorkersLost(f"no worker is left that can run clients, the last: {cause}")

    def start(self, call: Call, shared: Broadcast) -> None:
        self.call: Call = call
        self.version = shared.version
        self.specs = self.board.post(shared.leaves)

    def put(self, task: Any) -> None:
        self.waiting.append(task)

    def go(self) -> None:
        while self.working:  # workers that had the last results of the phase before: about to say that they are done
            self._listen()
        self._begin()

    def get(self) -> tuple[Any, TaskResult | Failure]:
        while not self.over:
            if not self.working:
                self._begin()
            self._listen()
        return self.over.popleft()

    def _listen(self) -> None:
        """Wait for workers that are done or gone, for a while; take what results there are."""
        ready = over(self.working, LOOK_SECONDS)
        self.check()
        for bell in ready:
            if bell in self.working:  # else its worker was given up meanwhile
                self._returned(bell)
        if not ready:
            self._look()
        self._gather()

    def _begin(self) -> None:
        """Have all workers work on what waits."""
        taken, later = {slot_of(task) for task in self.batch}, []
        while self.waiting and len(self.batch) < MOST_TASKS:
            task = self.waiting.popleft()
            (later if slot_of(task) in taken else self.batch).append(task)
            taken.add(slot_of(task))
        self.waiting.extendleft(reversed(later))
        slots = [slot_of(task) for task in self.batch]
        self.board.open(slots)
        tasks = PackedTasks.of(self.batch) if self.call == "train" else self.batch
        told = pickle.dumps(Order(self.call, slots, tasks, self.version, self.specs), protocol=5)
        self.order = os.pwrite(self.orders, told, 0)
        self.began = time.monotonic()
        for seat in self.seats[: len(self.batch)]:
            self._ring(seat)

    def _ring(self, seat: Seat) -> None:
        seat.bell.ring(self.order)
        self.working[seat.bell] = seat

    def _gather(self) -> None:
        """Take what is done off the board."""
        left, unfit = [], []
        for task in self.batch:
            result = self.board.get(slot_of(task))
            if result is None:
                left.append(task)
                continue
            reply, leaves = result
            if isinstance(reply, Failure) and reply.kind == "worker":
                unfit.append(reply)
                self.waiting.append(task)
                continue
            self.deaths = 0
            self.over.append((task, reply if isinstance(reply, Failure) else reply._replace(leaves=leaves)))
        self.batch = left
        for reply in unfit:
            for seat in [seat for seat in self.seats if seat.number == reply.worker]:
                self._retire(seat, reply.cause)

    def _returned(self, bell: Bell) -> None:
        """A worker has found nothing more to do, or is gone."""
        seat = self.working.pop(bell)
        if bell.answer():
            return
        try:
            ray.get(seat.end)
        except RayTaskError as error:
            cause = error.cause if isinstance(error.cause, Exception) else error
            raise cause from cause.__cause__
        except RayError as error:
            self._lost(seat, death(error, self.run_spec))

    def _lost(self, seat: Seat, why: Failure) -> None:
        """Replace a worker; blame the task that it had claimed."""
        where, cause = seat.name, why.cause
        self.deaths += 1
        if self.deaths > DEATHS:
            raise WorkersLost(f"{self.deaths} workers died in a row without finishing a task, the last: {cause}")
        self.tell(f"{where}: {cause}; another one starts")
        seat.leave()
        another = self._seat(seat.group, seat.bundle)
        self.seats[self.seats.index(seat)] = another
        self._gather()
        for task in [task for task in self.batch if self.board.claimed_by(slot_of(task)) == seat.number]:
            self.batch.remove(task)
            self.over.append((task, why._replace(where=where)))
        if self.batch:
            self._ring(another)

    # --- workers that hang --------------------------------------------------------------------------------------------
    def _look(self) -> None:
        patience = self.run_spec.experiment.engine.patience
        for seat in list(self.working.values()):
            last = max(float(self.beats[seat.number]), self.began)
            try:
                limit = patience if seat.up(0) else max(patience, start_seconds(self.run_spec))
            except RayError as error:
                self.working.pop(seat.bell)
                another = self._died_starting(seat, error)
                if another is not None and self.batch:
                    self._ring(another)
                continue
            if time.monotonic() - last > limit:
                self.tell(f"{seat.name} has taken no step for {patience:g} s; its stack:\n{seat.told()}")
                self.working.pop(seat.bell)
                seat.kill()
                self._lost(seat, Failure(f"no step for {patience:g} s (engine.patience)", ""))

    def rest(self) -> Iterable[PartialSum]:
        return ()

    def facts(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        for seat in self.seats:
            seat.leave()
        os.close(self.handle)
        os.close(self.orders)
        self.board.close()
        if self.room:
            self.room.leave()

"""Client hosts as Ray actors: they pull tasks, are watched, and replaced when they die or hang."""

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

from .bell import Bell, over
from .board import Board, nameless
from .cohort import MOST
from .config import HostGroup
from .connect import here
from .errors import HostsLost
from .fleet import Call, Failure
from .host import Packed, Shared
from .host_process import HostProcess, Order, Signs, board_sizes, slot_of
from .job import Job
from .room import Room
from .rows import Place
from .seat import Seat, said
from .sums import Part, Sums

LOOK_SECONDS = 0.5
"""How often hosts are looked at while nothing comes."""
DEATHS = 20
"""Hosts lost in a row, with no task done in between, before the run is given up."""
STARTS = 3
"""Hosts that may die in a row as the run begins, before it is given up."""
START_SECONDS = 120.0
"""What a replacement may take to start, where engine.patience is less."""
SEATS = 4096
Calls = tuple[Callable[[], None], Callable[[str], None]]


class RayFleet:
    """calls: (check, called while waiting, may raise to stop; tell, is told what a log should have)."""

    def __init__(self, job: Job, data: Sequence[Any], place: Place, calls: Calls, room: Room | None = None) -> None:
        """room: on a cluster that was there before, what has been taken of it."""
        self.job, self.data, self.place, self.room = job, data, place, room
        self.check, self.tell = calls
        self.handle, self.path = nameless("fedfleet-beats")
        os.ftruncate(self.handle, SEATS * 8)
        self.beats = np.memmap(self.path, np.float64, "r+", shape=(SEATS,))
        self.orders, self.orders_path = nameless("fedfleet-orders")
        self.board = Board.make(*board_sizes(job))
        self.made, self.deaths = 0, 0
        groups = [group for group in job.experiment.engine.groups() for _ in range(group.count)]
        self.seats = [self._seat(group, bundle) for bundle, group in enumerate(groups)]
        self.waiting: deque[Any] = deque()
        self.batch: list[Any] = []  # tasks under way
        self.working: dict[Bell, Seat] = {}  # who works on the batch
        self.began = 0.0
        self.over: deque[tuple[Any, Sums | Failure]] = deque()
        try:
            for i in range(len(self.seats)):
                self._started(i)
        except BaseException:
            self.close()
            raise

    def _seat(self, group: HostGroup, bundle: int) -> Seat:
        number = self.made % SEATS
        self.made += 1
        self.beats[number] = time.monotonic()
        stack, path = nameless("fedfleet-stack")
        bell = Bell()
        signs = Signs(number, self.path, path, bell.ends, self.orders_path)
        where = self.room.of(bundle) if self.room else here()
        options: dict[str, Any] = {"num_cpus": group.cpus, "num_gpus": group.gpus, "resources": group.resources}
        made: Any = ray.remote(**options, scheduling_strategy=where)(HostProcess)
        job = self.job if group.gpus or not self.job.experiment.engine.on_gpus() else self.job.on_processor()
        actor = made.remote(job, *self.data, self.place, signs, self.board.address)
        return Seat(actor, number, bell, actor.ready.remote(), actor.serve.remote(), stack, group, bundle)

    def _started(self, i: int) -> None:
        """Wait for a first host; some may die on the way."""
        for _ in range(STARTS):
            seat = self.seats[i]
            try:
                while not seat.up(LOOK_SECONDS):
                    self.check()
                return
            except RayError as error:
                cause = said(error)
                self.tell(f"host {seat.number} died as it started: {cause}")
            seat.leave()
            self.seats[i] = self._seat(seat.group, seat.bundle)
        raise HostsLost(f"{STARTS} hosts in a row died as they started, the last: {cause}")

    def start(self, call: Call, shared: Shared) -> None:
        self.call: Call = call
        self.version = shared.version
        self.specs = self.board.post(shared.leaves)

    def put(self, task: Any) -> None:
        self.waiting.append(task)

    def go(self) -> None:
        while self.working:  # hosts that had the last results of the phase before: about to say that they are done
            self._listen()
        self._begin()

    def get(self) -> tuple[Any, Sums | Failure]:
        while not self.over:
            if not self.working:
                self._begin()
            self._listen()
        return self.over.popleft()

    def _listen(self) -> None:
        """Wait for hosts that are done or gone, for a while; take what results there are."""
        ready = over(self.working, LOOK_SECONDS)
        self.check()
        for bell in ready:
            self._returned(bell)
        if not ready:
            self._look()
        self._gather()

    def _begin(self) -> None:
        """Have all hosts work on what waits."""
        taken, later = {slot_of(task) for task in self.batch}, []
        while self.waiting and len(self.batch) < MOST:
            task = self.waiting.popleft()
            (later if slot_of(task) in taken else self.batch).append(task)
            taken.add(slot_of(task))
        self.waiting.extendleft(reversed(later))
        slots = [slot_of(task) for task in self.batch]
        self.board.open(slots)
        tasks = Packed.of(self.batch) if self.call == "train" else self.batch
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
        left = []
        for task in self.batch:
            result = self.board.get(slot_of(task))
            if result is None:
                left.append(task)
                continue
            reply, leaves = result
            self.deaths = 0
            self.over.append((task, reply if isinstance(reply, Failure) else reply._replace(leaves=leaves)))
        self.batch = left

    def _returned(self, bell: Bell) -> None:
        """A host has found nothing more to do, or is gone."""
        seat = self.working.pop(bell)
        if bell.answer():
            return
        try:
            ray.get(seat.end)
        except RayTaskError as error:
            cause = error.cause if isinstance(error.cause, Exception) else error
            raise cause from cause.__cause__
        except RayError as error:
            self._lost(seat, f"the host died: {type(error).__name__}")

    def _lost(self, seat: Seat, cause: str) -> None:
        """Replace a host; blame the task that it had claimed."""
        where = seat.name
        self.deaths += 1
        if self.deaths > DEATHS:
            raise HostsLost(f"{self.deaths} hosts died in a row without finishing a task, the last: {cause}")
        self.tell(f"{where}: {cause}; another one starts")
        seat.leave()
        another = self._seat(seat.group, seat.bundle)
        self.seats[self.seats.index(seat)] = another
        self._gather()
        for task in [task for task in self.batch if self.board.claimed_by(slot_of(task)) == seat.number]:
            self.batch.remove(task)
            self.over.append((task, Failure(cause, where)))
        if self.batch:
            self._ring(another)

    # --- hosts that hang --------------------------------------------------------------------------------------------
    def _look(self) -> None:
        patience = self.job.experiment.engine.patience
        for seat in list(self.working.values()):
            last = max(float(self.beats[seat.number]), self.began)
            try:
                limit = patience if seat.up(0) else max(patience, START_SECONDS)
            except RayError as error:
                self._lost(self.working.pop(seat.bell), f"it died as it started: {said(error)}")
                continue
            if time.monotonic() - last > limit:
                self.tell(f"{seat.name} has taken no step for {patience:g} s; its stack:\n{seat.told()}")
                self.working.pop(seat.bell)
                seat.kill()
                self._lost(seat, f"no step for {patience:g} s (engine.patience)")

    def rest(self) -> Iterable[Part]:
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

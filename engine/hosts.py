"""Client hosts as Ray actors: they pull tasks, are watched, and replaced when they die or hang."""

from __future__ import annotations

import os
import pickle
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

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


class Seat(NamedTuple):
    """One host; `pid` and `end` are references, to its process's number and to what it ends by; `stack` is the handle
    of the file for its stack."""

    actor: Any
    number: int
    bell: Bell
    pid: Any
    end: Any
    stack: int
    group: HostGroup
    bundle: int  # of the run's room


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
            while not ray.wait([seat.pid], timeout=LOOK_SECONDS)[0]:
                self.check()
            try:
                ray.get(seat.pid)
                seat.bell.taken()
                return
            except RayError as error:
                cause = said(error)
                self.tell(f"host {seat.number} died as it started: {cause}")
            leave(seat)
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
            raise error.cause if isinstance(error.cause, Exception) else error from None
        except RayError as error:
            self._lost(seat, f"the host died: {type(error).__name__}")

    def _lost(self, seat: Seat, cause: str) -> None:
        """Replace a host; blame the task that it had claimed."""
        where = self._name(seat)
        self.deaths += 1
        if self.deaths > DEATHS:
            raise HostsLost(f"{self.deaths} hosts died in a row without finishing a task, the last: {cause}")
        self.tell(f"{where}: {cause}; another one starts")
        leave(seat)
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
            up = self._up(seat)
            if up is None:
                continue
            if time.monotonic() - last > (patience if up else max(patience, START_SECONDS)):
                self.tell(f"{self._name(seat)} has taken no step for {patience:g} s; its stack:\n{self._stack(seat)}")
                self.working.pop(seat.bell)
                self._kill(seat)
                self._lost(seat, f"no step for {patience:g} s (engine.patience)")

    def _up(self, seat: Seat) -> bool | None:
        """Whether it has started; None where it died of that."""
        if not ray.wait([seat.pid], timeout=0)[0]:
            return False
        try:
            ray.get(seat.pid)
        except RayError as error:
            self._lost(self.working.pop(seat.bell), f"it died as it started: {said(error)}")
            return None
        seat.bell.taken()
        return True

    def _stack(self, seat: Seat) -> str:
        """What the host is doing, by its own account; Python need not be running for it."""
        try:
            os.kill(ray.get(seat.pid, timeout=1), signal.SIGUSR1)
        except (OSError, RayError):
            return "(it does not answer)"
        deadline, size = time.monotonic() + 2, -1
        while time.monotonic() < deadline and (size <= 0 or os.fstat(seat.stack).st_size != size):
            size = os.fstat(seat.stack).st_size
            time.sleep(0.05)
        return os.pread(seat.stack, max(size, 0), 0).decode(errors="replace") or "(it does not answer)"

    def _kill(self, seat: Seat) -> None:
        """Gone when this returns, or as good as: a host that writes on could spoil a later task."""
        try:
            os.kill(ray.get(seat.pid, timeout=1), signal.SIGKILL)
        except (OSError, RayError):
            ray.kill(seat.actor)

    def _name(self, seat: Seat) -> str:
        try:
            return f"host {seat.number}, process {ray.get(seat.pid, timeout=0)}"
        except RayError:
            return f"host {seat.number}"

    def rest(self) -> Iterable[Part]:
        return ()

    def facts(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        for seat in self.seats:
            leave(seat)
        os.close(self.handle)
        os.close(self.orders)
        self.board.close()
        if self.room:
            self.room.leave()


def leave(seat: Seat) -> None:
    ray.kill(seat.actor)
    os.close(seat.stack)
    seat.bell.close()


def said(error: Exception) -> str:
    """The last line of an error of Ray's, which tells most."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1][:300]}" if lines else type(error).__name__

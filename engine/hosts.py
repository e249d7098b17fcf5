"""Client hosts as Ray actors: they pull tasks, are watched, and replaced when they die or hang."""

from __future__ import annotations

import faulthandler
import os
import shutil
import signal
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from torch.utils import _pytree as pytree

from ..workloads.base import Parts
from .board import Address, Board, Spec
from .cohort import MOST
from .columns import from_arrow
from .errors import HostsLost
from .fleet import Call, Failure
from .forms import Forms
from .host import Data, Host, Shared, Sums
from .job import Job
from .store import Place

LOOK_SECONDS = 0.5
"""How often hosts are looked at while nothing comes."""
DEATHS = 20
"""Hosts lost in a row, with no task done in between, before the run is given up."""
SEATS = 4096


class Order(NamedTuple):
    """What every host is told of a batch: do `call` on any of `tasks` that nobody has claimed."""

    call: Call
    tasks: list[Any]
    version: int
    specs: list[Spec]  # of what is broadcast


class HostProcess(Host):
    """seat: (folder, number) of this host's sign of life, a time in a shared file, and of its stack when it hangs."""

    def __init__(
        self, job: Job, train: Any, test: Any, parts: Parts, place: Place, seat: tuple[str, int], board: Address
    ) -> None:
        folder, self.number = seat
        self.board, self.read = Board(board), Shared(-1, [])
        beats = np.memmap(Path(folder) / "beats", np.float64, "r+")

        def beat() -> None:
            beats[self.number] = time.monotonic()

        self.stack = stack_file(folder, self.number).open("w")
        faulthandler.register(signal.SIGUSR1, file=self.stack, all_threads=True)
        super().__init__(job, Data(from_arrow(train), from_arrow(test), parts), place, beat)

    def ready(self) -> int:
        return os.getpid()

    def work(self, order: Order) -> None:
        """Do tasks until none is left."""
        if self.read.version != order.version:
            self.read = Shared(order.version, self.board.posted(order.specs))
        slots = [slot_of(task) for task in order.tasks]
        while (place := self.board.claim(slots, self.number)) is not None:
            self.beat()
            try:
                sums: Sums | Failure = getattr(self, order.call)(order.tasks[place], self.read)
            except Exception as error:  # a method's, a workload's or a plug-in's, of whatever kind
                sums = Failure(f"{type(error).__name__}: {error}"[:2000], f"host {self.number}, process {os.getpid()}")
            if isinstance(sums, Failure):
                self.board.put(slots[place], sums, [])
            else:
                self.board.put(slots[place], sums._replace(leaves=[]), sums.leaves)


def slot_of(task: Any) -> int:
    return task.index % MOST


def stack_file(folder: str, number: int) -> Path:
    return Path(folder) / f"stack-{number}.txt"


class Seat(NamedTuple):
    """One host; `pid` is a reference to its process's number."""

    actor: Any
    number: int
    pid: Any


class RayFleet:
    """check: called while waiting; may raise to stop. tell: is told what a log should have."""

    def __init__(
        self, job: Job, data: Sequence[Any], place: Place, check: Callable[[], None], tell: Callable[[str], None]
    ) -> None:
        self.job, self.data, self.place, self.check, self.tell = job, data, place, check, tell
        self.folder = tempfile.mkdtemp(prefix="fedfleet-hosts-")
        self.beats = np.memmap(Path(self.folder) / "beats", np.float64, "w+", shape=(SEATS,))
        self.board = Board.make(*board_sizes(job))
        engine = job.experiment.engine
        # Store and board are this node's, so are their readers.
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        options: dict[str, Any] = {"num_cpus": engine.cpus, "num_gpus": engine.gpus, "scheduling_strategy": here}
        self.actor: Any = ray.remote(**options)(HostProcess)
        self.made, self.deaths = 0, 0
        self.seats = [self._seat() for _ in range(engine.count_hosts())]
        self.waiting: deque[Any] = deque()
        self.batch: list[Any] = []  # tasks under way
        self.working: dict[Any, Seat] = {}  # reference -> who works on the batch
        self.began = 0.0
        self.over: deque[tuple[Any, Sums | Failure]] = deque()
        for seat in self.seats:
            ray.get(seat.pid)

    def _seat(self) -> Seat:
        number = self.made % SEATS
        self.made += 1
        self.beats[number] = time.monotonic()
        actor = self.actor.remote(self.job, *self.data, self.place, (self.folder, number), self.board.address)
        return Seat(actor, number, actor.ready.remote())

    def start(self, call: Call, shared: Shared) -> None:
        self.call: Call = call
        self.version = shared.version
        self.specs = self.board.post(shared.leaves)

    def put(self, task: Any) -> None:
        self.waiting.append(task)

    def get(self) -> tuple[Any, Sums | Failure]:
        while not self.over:
            if not self.working:
                self._begin()
            ready, _ = ray.wait(list(self.working), num_returns=1, timeout=LOOK_SECONDS)
            self.check()
            for reference in ready:
                self._returned(reference)
            if not ready:
                self._look()
            self._gather()
        return self.over.popleft()

    def _begin(self) -> None:
        """Have all hosts work on what waits."""
        while self.waiting and len(self.batch) < MOST:
            self.batch.append(self.waiting.popleft())
        self.board.open([slot_of(task) for task in self.batch])
        self.order = ray.put(Order(self.call, list(self.batch), self.version, self.specs))
        self.began = time.monotonic()
        for seat in self.seats[: len(self.batch)]:
            self.working[seat.actor.work.remote(self.order)] = seat

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

    def _returned(self, reference: Any) -> None:
        """A host has found nothing more to do, or is gone."""
        seat = self.working.pop(reference)
        try:
            ray.get(reference)
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
        ray.kill(seat.actor)
        another = self._seat()
        self.seats[self.seats.index(seat)] = another
        self._gather()
        for task in [task for task in self.batch if self.board.claimed_by(slot_of(task)) == seat.number]:
            self.batch.remove(task)
            self.over.append((task, Failure(cause, where)))
        if self.batch:
            self.working[another.actor.work.remote(self.order)] = another

    # --- hosts that hang --------------------------------------------------------------------------------------------
    def _look(self) -> None:
        patience = self.job.experiment.engine.patience
        for reference, seat in list(self.working.items()):
            last = max(float(self.beats[seat.number]), self.began)
            if time.monotonic() - last > patience:
                self.tell(f"{self._name(seat)} has taken no step for {patience:g} s; its stack:\n{self._stack(seat)}")
                self.working.pop(reference)
                self._kill(seat)
                self._lost(seat, f"no step for {patience:g} s (engine.patience)")

    def _stack(self, seat: Seat) -> str:
        """What the host is doing, by its own account; Python need not be running for it."""
        try:
            os.kill(ray.get(seat.pid, timeout=1), signal.SIGUSR1)
        except (OSError, RayError):
            return "(it does not answer)"
        path = stack_file(self.folder, seat.number)
        deadline, size = time.monotonic() + 2, -1
        while time.monotonic() < deadline and (not path.stat().st_size or path.stat().st_size != size):
            size = path.stat().st_size
            time.sleep(0.05)
        return path.read_text() or "(it does not answer)"

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

    def close(self) -> None:
        for seat in self.seats:
            ray.kill(seat.actor)
        self.board.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def board_sizes(job: Job) -> tuple[int, int, int, int]:
    """(head, arrays, reply, slots) of a board that holds what any phase of the run shares and returns."""
    method, x = job.method(), job.start()
    methods = [each for each in (method, method.opening) if each is not None]
    forms = [Forms(each, x) for each in methods]
    sums = max(sum(bytes_of(leaf) for leaf in pytree.tree_leaves(form.message)) for form in forms)
    public = sum(bytes_of(leaf) for leaf in pytree.tree_leaves(forms[0].server.public))
    plan = job.experiment.federation
    clients = plan.clients if len(methods) > 1 else plan.cohort
    return public, sums, 8192 + 128 * clients, MOST


def bytes_of(leaf: Any) -> int:
    """On the board, as float64 or narrower."""
    return Spec(tuple(leaf.shape), "<f8").bytes

"""Client hosts as Ray actors: handed tasks, watched, replaced when they die or hang."""

from __future__ import annotations

import faulthandler
import os
import shutil
import signal
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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

AHEAD = 2
"""Tasks a host is given at a time: one to run and one waiting, so that it is never idle while work is left."""
LOOK_SECONDS = 0.5
"""How often hosts are looked at while nothing comes."""
DEATHS = 20
"""Hosts lost in a row, with no task done in between, before the run is given up."""
SEATS = 4096


class Posted(NamedTuple):
    """What all tasks of a phase read, as it lies on the board."""

    version: int
    specs: list[Spec]


class Returned(NamedTuple):
    """A task's sums, their arrays in the task's slot of the board."""

    sums: Sums
    specs: list[Spec]


class HostProcess(Host):
    """seat: (folder, number) of this host's sign of life, a time in a shared file, and of its stack when it hangs."""

    def __init__(
        self, job: Job, train: Any, test: Any, parts: Parts, place: Place, seat: tuple[str, int], board: Address
    ) -> None:
        folder, number = seat
        self.board, self.read = Board(board), Shared(-1, [])
        beats = np.memmap(Path(folder) / "beats", np.float64, "r+")

        def beat() -> None:
            beats[number] = time.monotonic()

        self.stack = stack_file(folder, number).open("w")
        faulthandler.register(signal.SIGUSR1, file=self.stack, all_threads=True)
        super().__init__(job, Data(from_arrow(train), from_arrow(test), parts), place, beat)

    def ready(self) -> int:
        return os.getpid()

    def work(self, call: Call, task: Any, posted: Posted) -> Returned:
        if self.read.version != posted.version:
            self.read = Shared(posted.version, self.board.posted(posted.specs))
        sums: Sums = getattr(self, call)(task, self.read)
        return Returned(sums._replace(leaves=[]), self.board.put(task.index, sums.leaves))


def stack_file(folder: str, number: int) -> Path:
    return Path(folder) / f"stack-{number}.txt"


@dataclass
class Seat:
    """One host and what it has been handed, in order; it runs the first."""

    actor: Any
    number: int
    pid: Any  # a reference
    running: deque[tuple[Any, Any]] = field(default_factory=deque)  # (reference, task)
    handed: float = 0.0  # when it last had nothing to do


class RayFleet:
    """check: called while waiting; may raise to stop. tell: is told what a log should have."""

    def __init__(
        self, job: Job, data: Sequence[Any], place: Place, check: Callable[[], None], tell: Callable[[str], None]
    ) -> None:
        self.job, self.data, self.place, self.check, self.tell = job, data, place, check, tell
        self.folder = tempfile.mkdtemp(prefix="fedfleet-hosts-")
        self.beats = np.memmap(Path(self.folder) / "beats", np.float64, "w+", shape=(SEATS,))
        engine = job.experiment.engine
        # The store is a file of this node, so are its readers.
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        self.board, self.handle = Board.make(*board_sizes(job))
        options: dict[str, Any] = {"num_cpus": engine.cpus, "num_gpus": engine.gpus, "scheduling_strategy": here}
        self.actor: Any = ray.remote(**options)(HostProcess)
        self.made, self.deaths = 0, 0
        self.seats = [self._seat() for _ in range(engine.count_hosts())]
        self.waiting: deque[Any] = deque()
        self.over: deque[tuple[Any, Sums | Failure]] = deque()
        for seat in self.seats:
            ray.get(seat.pid)

    def _seat(self) -> Seat:
        number = self.made % SEATS
        self.made += 1
        actor = self.actor.remote(self.job, *self.data, self.place, (self.folder, number), self.board.address)
        return Seat(actor, number, actor.ready.remote())

    def start(self, call: Call, shared: Shared) -> None:
        self.call, self.posted = call, Posted(shared.version, self.board.post(shared.leaves))

    def put(self, task: Any) -> None:
        self.waiting.append(task)

    def get(self) -> tuple[Any, Sums | Failure]:
        while not self.over:
            self._hand_out()
            references = [reference for seat in self.seats for reference, _ in seat.running]
            ready, _ = ray.wait(references, num_returns=1, timeout=LOOK_SECONDS)
            self.check()
            if ready:
                self._collect(ready[0])
            else:
                self._look()
        return self.over.popleft()

    def _hand_out(self) -> None:
        for depth in range(AHEAD):
            for seat in self.seats:
                if self.waiting and len(seat.running) <= depth:
                    if not seat.running:
                        seat.handed = time.monotonic()
                    task = self.waiting.popleft()
                    seat.running.append((seat.actor.work.remote(self.call, task, self.posted), task))

    def _collect(self, reference: Any) -> None:
        seat = next(seat for seat in self.seats if any(reference == other for other, _ in seat.running))
        task = next(task for other, task in seat.running if other == reference)
        try:
            result: Sums | Failure = self._sums(ray.get(reference))
            self.deaths = 0
        except RayTaskError as error:
            result = Failure(reason(error), self._name(seat))
        except RayError as error:
            return self._lost(seat, f"the host died: {type(error).__name__}")
        seat.running = deque(pair for pair in seat.running if pair[0] != reference)
        self.over.append((task, result))

    def _sums(self, returned: Returned) -> Sums:
        return returned.sums._replace(leaves=self.board.get(returned.sums.index, returned.specs))

    def _lost(self, seat: Seat, cause: str) -> None:
        """Replace a host; blame the task that it was running, hand the others out again."""
        where = self._name(seat)
        self.deaths += 1
        if self.deaths > DEATHS:
            raise HostsLost(f"{self.deaths} hosts died in a row without finishing a task, the last: {cause}")
        self.tell(f"{where}: {cause}; another one starts")
        self.seats[self.seats.index(seat)] = self._seat()
        ray.kill(seat.actor)
        blamed = False
        for reference, task in seat.running:
            try:
                self.over.append((task, self._sums(ray.get(reference, timeout=0 if blamed else 10))))
            except RayTaskError as error:
                self.over.append((task, Failure(reason(error), where)))
            except RayError:
                if blamed:
                    self.waiting.appendleft(task)
                else:
                    self.over.append((task, Failure(cause, where)))
                blamed = True

    # --- hosts that hang --------------------------------------------------------------------------------------------
    def _look(self) -> None:
        patience = self.job.experiment.engine.patience
        for seat in list(self.seats):
            last = max(float(self.beats[seat.number]), seat.handed)
            if seat.running and time.monotonic() - last > patience:
                self.tell(f"{self._name(seat)} has taken no step for {patience:g} s; its stack:\n{self._stack(seat)}")
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
        try:
            os.kill(ray.get(seat.pid, timeout=1), signal.SIGKILL)
        except (OSError, RayError):
            ray.kill(seat.actor)

    def _name(self, seat: Seat) -> str:
        try:
            return f"host {seat.number} (process {ray.get(seat.pid, timeout=0)})"
        except RayError:
            return f"host {seat.number}"

    def close(self) -> None:
        for seat in self.seats:
            ray.kill(seat.actor)
        os.close(self.handle)
        shutil.rmtree(self.folder, ignore_errors=True)


def board_sizes(job: Job) -> tuple[int, int, int]:
    """(head, slot, slots) of a board that holds what any phase of the run shares and returns."""
    method, x = job.method(), job.start()
    all_forms = [Forms(each, x) for each in (method, method.opening) if each is not None]
    double = [
        [Spec(tuple(leaf.shape), "<f8").bytes for leaf in pytree.tree_leaves(forms.message)] for forms in all_forms
    ]
    public = [Spec(tuple(leaf.shape), "<f8").bytes for leaf in pytree.tree_leaves(all_forms[0].server.public)]
    return sum(public), max(map(sum, double)), MOST


def reason(error: RayTaskError) -> str:
    """The host's exception in a line."""
    cause = error.cause
    return f"{type(cause).__name__}: {cause}" if isinstance(cause, BaseException) else str(error).splitlines()[-1]

"""The driver's side of runs that share processes: it starts the processes, and passes runs and reports on.

This is for one machine, and without Ray, whose processes take longer to start than some of these runs take.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import wait
from typing import Any, NamedTuple

from ...engine.errors import FedFleetError
from .fork_server import ForkServer, taken
from .source import HEARTBEAT_SECONDS, Executor, RunRequest, Source

GRACE_SECONDS = 30.0
"""The time in which processes must write checkpoints and end when they are asked to."""

FAILED_STARTS = 3
"""How many processes may end before they have begun a run."""


class ProcessStart(NamedTuple):
    """What a process needs before its first run. path: where it looks for modules. variables: of the environment.
    at_once: the most runs at once. share: the part of the available memory that the process may use."""

    cwd: str
    path: list[str]
    variables: dict[str, str]
    at_once: int
    share: float


class Process:
    """A process, and the runs that it has. `id`: its number in the system, 0 until it has begun. `waits`: whether it
    waits for an answer. `wants`: whether it has been given no run since it asked. `lone`: whether it must have no other
    run beside the one that it has."""

    def __init__(self, server: ForkServer, start: ProcessStart) -> None:
        self.connection = server.fork()
        self.runs: dict[str, RunRequest] = {}
        self.id, self.waits, self.wants, self.lone = 0, False, False, False
        self._send(start)

    def send(self, *message: Any) -> None:
        self._send(message)

    def _send(self, message: Any) -> None:
        with suppress(OSError):  # it has died, which the next message from it tells
            self.connection.send(message)

    def end(self) -> None:
        """Wait until the process has ended. It must have been asked to."""
        deadline = time.monotonic() + GRACE_SECONDS
        with suppress(EOFError, OSError):  # that its end of the connection is closed
            while self.connection.poll(max(0.0, deadline - time.monotonic())):
                self.connection.recv()
            if self.id:
                os.kill(self.id, signal.SIGKILL)
        self.connection.close()


class Processes(Executor):
    """Executes runs in processes of this machine that several runs share, without Ray."""

    def __init__(self, processes: int, at_once: int) -> None:
        """Starts the processes. at_once: the most runs of all processes together."""
        variables = {name: value for name, value in os.environ.items() if name.startswith("FEDFLEET_")}
        self.settings = ProcessStart(os.getcwd(), list(sys.path), variables, -(-at_once // processes), 1 / processes)
        self.server = taken()
        self.processes = [Process(self.server, self.settings) for _ in range(processes)]
        self.rooms: dict[str, int] = {}  # kind -> how many runs of this kind fit into a process
        self.held: RunRequest | None = None  # the next run, which did not fit into a process
        self.again: deque[RunRequest] = deque()  # of a process that died
        self.died: set[str] = set()  # keys of the source's runs whose process died once
        self.failed_starts = 0

    def load(self, experiment: dict[str, Any]) -> None:
        for process in self.processes:
            process.send("data", experiment)

    def run(self, source: Source[Any], stop: Callable[[], Any]) -> None:
        self.source, self.died = source, set[str]()
        while self._hand_out(stop):
            if stop():
                self.close()
                return
            ready = wait([process.connection for process in self.processes], HEARTBEAT_SECONDS)
            for process in [each for each in self.processes if each.connection in ready]:
                self._hear(process)

    def close(self) -> None:
        for process in self.processes:
            process.send("stop")
        started = any(process.id for process in self.processes)  # otherwise the server may still be importing
        for process in self.processes if started else ():
            process.end()
        self.processes = []
        self.server.close(GRACE_SECONDS if started else 0.0)

    def _hand_out(self, stop: Callable[[], Any]) -> bool:
        """Give the processes the runs that they have room for; returns whether a run is under way or may follow.

        A run may follow while a process has not asked for runs since it was given some: it asks after each run's last
        report, and the source may have a run for it then.

        No process has more than its share of the runs that have not ended, so that the others have as much to do.
        Thousands of runs take a while, so that `stop` is asked before each one.
        """
        left = self.source.left + len(self.again) + (self.held is not None)
        share = -(-(left + sum(len(process.runs) for process in self.processes)) // len(self.processes))
        for process in self.processes:
            runs: list[RunRequest] = []
            free = max(1, share) - len(process.runs)
            while process.wants and len(runs) < free and not stop() and (request := self._next(process)) is not None:
                runs.append(request)
                process.runs[request.key] = request
            if stop():
                return True
            if runs:
                process.wants = False
            if runs or process.waits:
                process.waits = False
                process.send("runs", runs)
        under_way = self.again or self.held or any(process.runs for process in self.processes)
        begun = [process for process in self.processes if process.id]
        return bool(under_way) or not begun or not all(process.wants for process in begun)

    def _next(self, process: Process) -> RunRequest | None:
        """The next run for a process, None if there is none now."""
        if process.lone and process.runs:
            return None
        process.lone = False
        if self.again:
            if process.runs:
                return None
            process.lone = True
            return self.again.popleft()
        if not self._fits(process):
            return None
        request, self.held = self.held or self.source.next(), None
        if request is not None and not self._fits(process, request.kind):
            request, self.held = None, request
        return request

    def _fits(self, process: Process, kind: str = "") -> bool:
        """Whether a process has room for a run of a kind, or of any kind. Where the plan of a run is not known yet, no
        other one begins beside it."""
        kinds = [run.kind for run in process.runs.values()]
        if not all(each in self.rooms for each in kinds):
            return False
        full = sum(1 / self.rooms[each] for each in kinds)
        return not kinds or full + 1 / self.rooms.get(kind, self.settings.at_once) < 1 + 1e-9

    def _hear(self, process: Process) -> None:
        """Receive a message of a process."""
        try:
            kind, *content = process.connection.recv()
        except (EOFError, OSError):
            self._replace(process)
            return
        if kind == "room":
            process.id, rooms = content
            self.rooms |= rooms
            process.waits = process.wants = True
            return
        key, report = content
        if key not in process.runs:
            return  # it was told to end
        end = self.source.on_report(key, report)
        if report.status == "running":
            process.send("answer", key, end)
        if report.status != "running" or end:
            del process.runs[key]

    def _replace(self, process: Process) -> None:
        """A process has died. Its runs are tried again, each of them alone, so that only a run that kills its process
        fails."""
        process.end()
        self.failed_starts = 0 if process.runs else self.failed_starts + 1
        if self.failed_starts == FAILED_STARTS:
            raise FedFleetError("processes end before they begin a run; see their messages above")
        for key, request in process.runs.items():
            if key in self.died:
                self.source.on_process_death(key)
            else:
                self.died.add(key)
                self.again.append(request)
        if not self.server.alive:
            self.server = ForkServer()
        self.processes[self.processes.index(process)] = Process(self.server, self.settings)

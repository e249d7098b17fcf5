"""The driver's side of runs that share processes: it starts the processes, and passes runs and reports on.

This is for one machine, and without Ray, whose processes take longer to start than some of these runs take.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

from ...engine.errors import FedFleetError
from .source import HEARTBEAT_SECONDS, RunRequest, Source

CODE = "import sys; sys.path[:] = sys.argv[2].splitlines(); from {module} import main; main(int(sys.argv[1]))"
"""What a process executes. It looks for modules where this process does, and not in its current folder."""

GRACE_SECONDS = 30.0
"""The time in which processes must write checkpoints and end when they are asked to."""

FAILED_STARTS = 3
"""How many processes may end before they have begun a run."""


class Start(NamedTuple):
    """What a process needs before its first run. variables: of the environment. at_once: the most runs at once. share:
    the part of the available memory that the process may use."""

    cwd: str
    variables: dict[str, str]
    at_once: int
    share: float


class Process:
    """A process, and the runs that it has. `room`: how many more may begin. `waits`: whether it waits for them. `lone`:
    whether it must have no other run beside the one that it has."""

    def __init__(self, start: Start) -> None:
        mine, other = socket.socketpair()
        code = CODE.format(module=f"{__package__}.job")
        with other:
            self.popen = subprocess.Popen(
                [sys.executable, "-c", code, str(other.fileno()), "\n".join(sys.path)],
                pass_fds=[other.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the driver, which asks the processes to stop
            )
        self.connection = Connection(mine.detach())
        self.connection.send(start)
        self.runs: dict[str, RunRequest] = {}
        self.room, self.waits, self.lone = 0, False, False

    def send(self, *message: Any) -> None:
        with suppress(OSError):  # it has died, which the next message from it tells
            self.connection.send(message)

    def end(self) -> None:
        """Wait until the process has ended."""
        try:
            self.popen.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()
        self.connection.close()


class Jobs:
    """Executes a source's runs in processes that several runs share. A context manager, which ends the processes."""

    def __init__(self, processes: int, at_once: int) -> None:
        """Starts the processes. at_once: the most runs of all processes together."""
        variables = {name: value for name, value in os.environ.items() if name.startswith("FEDFLEET_")}
        self.start = Start(os.getcwd(), variables, -(-at_once // processes), 1 / processes)
        self.processes = [Process(self.start) for _ in range(processes)]
        self.again: deque[RunRequest] = deque()  # of a process that died
        self.died: set[str] = set()  # keys of runs whose process died once
        self.failed_starts = 0

    def __enter__(self) -> Jobs:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def run(self, source: Source, stop: Callable[[], Any]) -> None:
        """Execute runs until the source has none left or `stop` returns something true. Returns when all runs that were
        under way have ended."""
        self.source = source
        while self._hand_out():
            if stop():
                self.close()
                return
            ready = wait([process.connection for process in self.processes], HEARTBEAT_SECONDS)
            for process in [each for each in self.processes if each.connection in ready]:
                self._hear(process)

    def close(self) -> None:
        """End the processes, after their runs have written checkpoints."""
        for process in self.processes:
            process.send("stop")
            if not process.runs:
                process.popen.kill()  # it has nothing to write, and may still be starting
        for process in self.processes:
            process.end()
        self.processes = []

    def _hand_out(self) -> bool:
        """Give the processes the runs that they have room for; returns whether a run is under way or may follow."""
        share = max(1, -(-(self.source.left + len(self.again)) // len(self.processes)))
        for process in self.processes:
            runs: list[RunRequest] = []
            while process.room > 0 and len(runs) < share and (spec := self._next(process)) is not None:
                runs.append(spec)
                process.room -= 1
                process.runs[spec.key] = spec
            if runs or process.waits:
                process.waits = False
                process.send("runs", runs)
        under_way = self.again or any(process.runs for process in self.processes)
        return bool(under_way) or not any(process.room for process in self.processes)

    def _next(self, process: Process) -> RunRequest | None:
        """The next run for a process, None if there is none now."""
        if process.lone and process.runs:
            return None
        process.lone = False
        if not self.again:
            return self.source.next()
        if process.runs:
            return None
        process.lone = True
        return self.again.popleft()

    def _hear(self, process: Process) -> None:
        """Receive a message of a process."""
        try:
            kind, *content = process.connection.recv()
        except (EOFError, OSError):
            self._replace(process)
            return
        if kind == "room":
            process.room += content[0]
            process.waits = True
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
        for key, spec in process.runs.items():
            if key in self.died:
                self.source.on_process_death(key)
            else:
                self.died.add(key)
                self.again.append(spec)
        self.processes[self.processes.index(process)] = Process(self.start)

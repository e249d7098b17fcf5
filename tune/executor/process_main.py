"""A process that executes several runs at once, which share what runs can share. The fork server starts it.

They take turns in one thread, see `engine.runs.members`; another one listens. Messages of the driver:

    ("data", experiment)         plain data of an experiment, whose data runs will need soon
    ("runs", [RunRequest, ...])  the runs to begin, which answers "room"
    ("answer", key, end)         to a report of the run with this key; end: whether to end it
    ("stop",)                    all runs are to write checkpoints and end, and so does the process

Messages to the driver:

    ("room", id, rooms)          there may be room for runs. id: of this process. rooms: kind of runs -> how many of
                                 them fit into the process, for the kinds that it has had
    ("report", key, RunReport)      of a run
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from ...engine.config.schema import experiment
from ...engine.memory import available_memory, collect_seldom
from ...engine.run_spec import RunSpec
from ...engine.runs.members import Member, Members
from ...engine.stopping import on_signal
from .fork_server import CODE
from .processes import ProcessStart
from .requested_run import RequestedRun
from .source import HEARTBEAT_SECONDS, RunReport, RunRequest

VECTORS = 12
"""How many vectors of a model's length a client has, roughly, while it is trained in a block; for the use of memory."""


class MemberRun(RequestedRun):
    """A run among others."""

    def __init__(self, runs_here: RunsHere, request: RunRequest) -> None:
        super().__init__(request)
        self.runs_here, self.asked = runs_here, signal.SIGTERM if runs_here.ending else 0
        self.unanswered = False  # whether it waits for the answer to its last report
        member = Member(runs_here.members, lambda run_spec: runs_here.planned(request.kind, run_spec), self._waits)
        self.host = member
        member.begin(self._run())

    def _run(self) -> Generator[Any, Any, None]:
        try:
            yield from self.play()
        finally:
            del self.runs_here.runs[self.request.key]
            self.runs_here.asks = True

    def _waits(self) -> bool:
        return self.unanswered and not self.asked

    def send(self, report: RunReport) -> None:
        self.unanswered = report.status == "running" and self.request.columns is not None and self.request.may_end
        try:
            self.runs_here.connection.send(("report", self.request.key, report))
        except OSError:  # the driver was killed
            self.asked = signal.SIGTERM


class RunsHere:
    """The runs of this process."""

    def __init__(self, connection: Connection, start: ProcessStart) -> None:
        self.connection, self.start = connection, start
        self.members = Members()
        self.runs: dict[str, MemberRun] = {}
        self.rooms: dict[str, int] = {}  # kind -> how many runs of this kind fit into the process
        self.asks = True  # whether there may be room that the driver does not know of
        self.waits = False  # whether the driver has not answered yet that it was asked
        self.ending = False
        self.inbox: queue.Queue[Callable[[], None]] = queue.Queue()
        """What is to be done in the main thread. After it, runs may be able to go on."""

    def serve(self) -> None:
        """Execute runs until the driver asks to stop, or is gone."""
        threading.Thread(target=self._listen, daemon=True).start()
        while not self.ending or self.runs:
            self._ask()
            idle = not self.members.advance()
            with suppress(queue.Empty):
                while True:
                    self.inbox.get(timeout=HEARTBEAT_SECONDS if idle or self.waits else 0.0)()
                    idle = False

    def _begin(self, runs: Sequence[RunRequest] = ()) -> None:
        for request in runs:
            self.runs[request.key] = MemberRun(self, request)

    def _load(self, data: dict[str, Any]) -> None:
        """Get ready for runs with the data of an experiment. If that fails, the run will say so."""
        with suppress(Exception):
            self.members.data.get_ready(RunSpec.of("data", experiment(data)))

    def _listen(self) -> None:
        """Receive the driver's messages, in a thread of its own: a run can then be asked to end within a round."""
        while not self.ending:
            try:
                kind, *content = self.connection.recv()
            except (EOFError, OSError):  # the driver was killed
                kind, content = "stop", []
            if kind == "answer":
                key, end = content
                if run := self.runs.get(key):
                    run.asked = signal.SIGTERM if end else run.asked
                    run.unanswered = False
            elif kind == "stop":
                self.ending = True
                for run in list(self.runs.values()):
                    run.asked = signal.SIGTERM
            self.waits = self.waits and kind in ("answer", "data")
            does = {"runs": self._begin, "data": self._load}.get(kind)
            self.inbox.put(partial(does, content[0]) if does else self._begin)

    def _ask(self) -> None:
        """Tell the driver that there may be room for runs."""
        if self.asks and not self.ending:
            self.asks, self.waits = False, True
            self.connection.send(("room", os.getpid(), dict(self.rooms)))

    def planned(self, kind: str, run_spec: RunSpec) -> None:
        """Find out how many runs of a kind fit into the process, from the plan of a first one.

        Clients that are trained one at a time gain nothing from others, so such runs follow one after another.
        """
        if kind in self.rooms:
            return
        plan, cohort = run_spec.execution_plan, run_spec.experiment.federation.cohort
        self.rooms[kind], self.asks = 1, True
        if plan is None or plan.block == 1 or not run_spec.experiment.engine.vectorise:
            return
        bytes_of_run = 4 * VECTORS * cohort * run_spec.initial_model().flat.numel()
        memory = available_memory()
        fitting = self.start.at_once if memory is None else int(self.start.share * memory / 2 / bytes_of_run)
        self.rooms[kind] = max(1, min(self.start.at_once, fitting))


def serve(descriptor: int) -> None:
    """Fork a process whenever the driver at the other end of a connection asks for one, see `fork_server`.

    This process computes nothing and has one thread, as threads of libraries are not there after a fork. On macOS,
    whose own libraries do not survive a fork, it starts processes anew.
    """
    control, begun = socket.socket(fileno=descriptor), []
    collect_seldom()  # the collector would take 6 % of the time
    while True:
        asked, descriptors, *_ = socket.recv_fds(control, 1, 1)
        if not asked:  # the driver has ended, and so will the processes
            with suppress(ChildProcessError):
                while True:
                    os.wait()  # so that the time that they took counts as that of the driver's children
            os._exit(0)
        if sys.platform == "darwin":
            code = CODE.format(module=__name__, call="main")
            command = [sys.executable, "-c", code, str(descriptors[0]), "\n".join(sys.path)]
            begun.append(subprocess.Popen(command, pass_fds=descriptors))
        elif os.fork() == 0:
            control.close()
            main(descriptors[0])
        os.close(descriptors[0])


def main(descriptor: int) -> None:
    """Serve the driver at the other end of a connection, and exit."""
    try:
        on_signal()  # the driver says when to stop
        connection = Connection(descriptor)
        start: ProcessStart = connection.recv()
        os.chdir(start.cwd)
        sys.path[:] = start.path
        os.environ.update(start.variables)
        RunsHere(connection, start).serve()
    except (EOFError, ConnectionError):  # the driver has ended
        pass
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)

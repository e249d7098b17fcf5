"""A process that writes the run of a command to MLflow, beside the command.

To import MLflow takes as long as to import torch, and threads of one process would do it one after the other. A command
that is about to run rounds therefore begins this process once it has read its configuration, and imports torch
meanwhile. The process has a `MlflowWriter`, and gets its messages through a connection. What it prints, such as the
warning about a store that fails, is printed by the command. It ends with the command, whatever ends that.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from ...engine.stopping import blocked_signals
from ..streams import tell
from .mlflow_writer import MlflowWriter
from .stores import load_mlflow
from .writer import Batch, End, Inbox, warning

if TYPE_CHECKING:
    from ...engine.config.schema import Tracking

CODE = "import sys; sys.path[:] = sys.argv[2].splitlines(); from {module} import serve; serve(int(sys.argv[1]))"
"""What the process executes. It looks for modules where the command does, and not in its current folder."""


class MlflowProcess(Inbox):
    """The process, as the command sees it. `open` comes first, and `close` or `abandon` last."""

    def __init__(self) -> None:
        """Starts the process, which imports MLflow."""
        super().__init__()
        mine, other = socket.socketpair()
        with other, blocked_signals():  # they are for the command, with which the process ends
            self.popen = subprocess.Popen(
                [sys.executable, "-c", CODE.format(module=__name__), str(other.fileno()), "\n".join(sys.path)],
                pass_fds=[other.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                encoding="utf-8",
                errors="replace",
            )
        self.connection = Connection(mine.detach())
        self.what = ""
        self.printing = threading.Thread(target=self._print, name="mlflow", daemon=True)
        self.printing.start()

    def open(self, what: str, **arguments: Any) -> None:
        """Make the writer; the arguments are those of `MlflowWriter`."""
        self.what = what
        self._send({"what": what, **arguments})

    def put(self, message: Batch | End) -> None:
        if message.key in self.headers:
            began, header = self.headers.pop(message.key)
            self._send((message.key, began, header()))
        self._send(message)

    def close(self) -> None:
        """Wait until everything is written, see `Writer.close`."""
        self._send(None)
        self.printing.join()
        if status := self.popen.wait():
            tell(warning("not tracked in MLflow", f"the process that writes has ended with status {status}", self.what))

    def abandon(self) -> None:
        self.popen.kill()
        self.printing.join()
        self.popen.wait()

    def _send(self, message: Any) -> None:
        with suppress(OSError):  # the process has ended, which `close` tells
            self.connection.send(message)

    def _print(self) -> None:
        assert self.popen.stdout is not None
        with self.popen.stdout as lines:
            for line in lines:
                tell(line.rstrip("\n"))


def serve(descriptor: int) -> None:
    """Be the process: write what comes from the command at the other end of a connection, and exit."""
    connection = Connection(descriptor)
    with suppress(EOFError, ConnectionError):  # the command has ended
        load_mlflow()
        writer = MlflowWriter(**connection.recv())
        while (message := connection.recv()) is not None:
            if isinstance(message, tuple):
                key, began, header = message
                writer.headers[key] = began, lambda header=header: header
            else:
                writer.put(message)
        writer.close()
    sys.stdout.flush()
    os._exit(0)  # without waiting for a server that does not answer


_begun: MlflowProcess | None = None


@contextmanager
def beside(tracking: Tracking) -> Iterator[None]:
    """Begin a process for the run that starts in this context, if it writes to MLflow and MLflow is not imported yet.
    A graph of its model would need the network, and hence torch, in that process."""
    global _begun
    if "mlflow" in tracking.names and tracking.model != "graph" and "mlflow" not in sys.modules:
        _begun = MlflowProcess()
    try:
        yield
    finally:
        if process := taken():
            process.abandon()


def taken() -> MlflowProcess | None:
    """The process that has been begun, if no run has taken it yet."""
    global _begun
    process, _begun = _begun, None
    return process

"""The process that forks the processes that runs share, as its driver sees it. The module is quick to import.

To import torch and the engine takes about two seconds, longer than some runs take. The fork server imports them once,
for all processes that it forks, while the driver prepares its runs. What it executes is in `process_main`.
"""

from __future__ import annotations

import atexit
import socket
import subprocess
import sys
from contextlib import suppress
from multiprocessing.connection import Connection

from ...engine.stopping import blocked_signals

CODE = "import sys; sys.path[:] = sys.argv[2].splitlines(); from {module} import {call}; {call}(int(sys.argv[1]))"
"""What a process executes. It looks for modules where this process does, and not in its current folder."""

FORK = b"f"
"""The message that asks for a process. The end of a connection to the driver comes with it."""


class ForkServer:
    """Starts the process; `close` ends it."""

    def __init__(self) -> None:
        self.control, other = socket.socketpair()
        with other:
            code = CODE.format(module=f"{__package__}.process_main", call="serve")
            with blocked_signals():  # they are for the driver, which asks the processes to stop
                self.popen = subprocess.Popen(
                    [sys.executable, "-c", code, str(other.fileno()), "\n".join(sys.path)],
                    pass_fds=[other.fileno()],
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )
        atexit.register(self.close)

    def fork(self) -> Connection:
        """The driver's end of the connection to a new process. If the server has died, it is at its end at once."""
        mine, other = socket.socketpair()
        with other, suppress(OSError):
            socket.send_fds(self.control, [FORK], [other.fileno()])
        return Connection(mine.detach())

    @property
    def alive(self) -> bool:
        return self.popen.poll() is None

    def close(self, seconds: float = 0.0) -> None:
        """End the server, which waits for the end of the processes that it has forked, for at most so many seconds."""
        atexit.unregister(self.close)
        self.control.close()
        try:
            self.popen.wait(seconds)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()


_begun: ForkServer | None = None


def begin() -> None:
    """Start a fork server for the next call of `taken`, before a command that will need it makes its own imports."""
    global _begun
    if _begun is None:
        _begun = ForkServer()


def taken() -> ForkServer:
    """A fork server, which the caller closes."""
    global _begun
    server, _begun = _begun, None
    return server if server is not None and server.alive else ForkServer()


def not_needed() -> None:
    """End the fork server that was started for a command that does without."""
    global _begun
    if _begun is not None:
        _begun.close()
        _begun = None

"""The fork server as the process sees it that starts Ray. The module is quick to import."""

from __future__ import annotations

import atexit
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ....stopping import blocked_signals
from .start_worker import VARIABLE

VERSIONS = ("2.60.",)
"""The versions of Ray whose processes are forked. Another one may start its processes in another way, so that it does
this by itself until `tests/engine/test_process_start.py` has passed with it."""
CODE = (
    "import sys; path, sys.path[:] = sys.path[1:], sys.argv[3].splitlines(); "
    "from {module} import serve; serve(int(sys.argv[1]), int(sys.argv[2]), path)"
)
"""What the server executes. It looks for modules where this process does, and not in its current folder."""
WAITING = 128
"""How many processes of Ray may ask at the same time."""


class ForkServer:
    """The process, and the socket at which Ray's programs ask for others; `close` ends it. `used`: whether a Ray has
    started with it, for whose processes alone it is. Raises OSError where no socket can be made."""

    def __init__(self) -> None:
        self.used = False
        self.folder = Path(tempfile.mkdtemp(prefix="fedfleet-"))  # only this user may enter it
        self.control, theirs = socket.socketpair()
        with theirs, socket.socket(socket.AF_UNIX) as listener:
            try:
                listener.bind(str(self.path))
            except OSError:  # the path is too long, for example
                shutil.rmtree(self.folder, ignore_errors=True)
                raise
            listener.listen(WAITING)
            code = CODE.format(module=f"{__package__}.serving")
            sockets = listener.fileno(), theirs.fileno()
            with blocked_signals():  # they are for this process, which ends Ray
                self.popen = subprocess.Popen(
                    [sys.executable, "-c", code, *map(str, sockets), "\n".join(sys.path)],
                    pass_fds=sockets,
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )
        atexit.register(self.close)

    @property
    def path(self) -> Path:
        return self.folder / "socket"

    @property
    def alive(self) -> bool:
        return self.popen.poll() is None

    def close(self) -> None:
        """End the server at once. The processes that it has forked end with Ray, not with it."""
        atexit.unregister(self.close)
        self.control.close()
        self.popen.kill()
        self.popen.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


_server: ForkServer | None = None


def _forget() -> None:
    """Leave the server to the process that started it: this one is a fork of it."""
    global _server
    server, _server = _server, None
    if server is not None:
        atexit.unregister(server.close)
        server.control.close()  # the server ends when its own process has closed it


os.register_at_fork(after_in_child=_forget)


def begin() -> None:
    """Start a fork server if there is none that waits for Ray. A command that will start Ray calls this before it makes
    its own imports."""
    global _server
    if _server is not None and (_server.used or not _server.alive):
        end()
    if _server is None and sys.platform == "linux":
        try:
            _server = ForkServer()
        except OSError:
            return  # Ray starts its processes by itself


def end() -> None:
    """End the fork server if there is one."""
    global _server
    server, _server = _server, None
    if server is not None:
        server.close()


def process() -> set[int]:
    """The id of the fork server's process; empty if there is none."""
    return set() if _server is None else {_server.popen.pid}


@contextmanager
def forked_processes() -> Iterator[None]:
    """Ray that starts within the context has its processes forked.

    Ray has no argument for this, so that the name of its program for new processes is replaced while it starts.
    """
    import ray
    from ray._private import ray_constants

    before = getattr(ray_constants, "SETUP_WORKER_FILENAME", None)
    if before is None or not ray.__version__.startswith(VERSIONS):
        end()
        yield
        return
    begin()
    if _server is not None:
        _server.used = True
        os.environ[VARIABLE] = str(_server.path)
        ray_constants.SETUP_WORKER_FILENAME = str(Path(__file__).with_name("start_worker.py"))
    try:
        yield
    finally:
        os.environ.pop(VARIABLE, None)
        ray_constants.SETUP_WORKER_FILENAME = before

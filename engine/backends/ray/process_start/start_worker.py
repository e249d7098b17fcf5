"""The program that Ray executes when it needs a process. It has the fork server fork one, and ends.

It is executed as a file of its own, so that it imports nothing of this package, and little else. Ray's own program
takes its place if no fork server answers, or if Ray asks for more than a process of the interpreter as it is, such as
other environment variables.
"""

from __future__ import annotations

import array
import json
import os
import resource
import signal
import socket
import sys
from typing import Any

VARIABLE = "FEDFLEET_RAY_FORK_SERVER"
"""The environment variable with the path of the fork server's socket."""
CONTEXT, LANGUAGE = "--serialized-runtime-env-context=", "--language="
"""The arguments that are for Ray's own program, and not for the process that it starts."""
TYPE = "--worker-type="
"""The argument with what the process does; it executes tasks and actors if this is WORKER or is not given."""
ANSWER_SECONDS = 30.0
"""How long the fork server may take. Ray gives a process 60 seconds, and a busy machine imports slowly."""
FORK = b"f"
"""The byte that comes with the standard streams of the process, before the request."""


def main(arguments: list[str]) -> None:
    """arguments: the file of Ray's worker process, and its arguments."""
    server = os.environ.pop(VARIABLE, "")
    if not is_plain(arguments) or not forked(arguments, server):
        import ray

        own = os.path.join(os.path.dirname(ray.__file__), "_private", "workers", "setup_worker.py")
        os.execv(sys.executable, [sys.executable, own, *arguments])


def is_plain(arguments: list[str]) -> bool:
    """Whether Ray asks for a process of Python that executes tasks, in this interpreter and these surroundings."""
    types = {each.removeprefix(TYPE) for each in arguments if each.startswith(TYPE)}
    if f"{LANGUAGE}PYTHON" not in arguments or types - {"WORKER"}:
        return False
    contexts = [json.loads(each.removeprefix(CONTEXT) or "{}") for each in arguments if each.startswith(CONTEXT)]
    asked = {name: value for context in contexts for name, value in context.items() if value}
    return asked.get("py_executable", sys.executable) == sys.executable and asked.keys() <= {"py_executable"}


def forked(arguments: list[str], server: str) -> bool:
    """Ask the fork server for the process; returns whether there is one. server: the path of its socket."""
    request = json.dumps(described(arguments)).encode()
    streams = array.array("i", [0, 1, 2])
    try:
        with socket.socket(socket.AF_UNIX) as line:
            line.settimeout(ANSWER_SECONDS)
            line.connect(server)
            line.sendmsg([FORK], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams)])
            line.sendall(request)
            line.shutdown(socket.SHUT_WR)
            return line.recv(1) == FORK
    except OSError:
        return False


def described(arguments: list[str]) -> dict[str, Any]:
    """What the process shares with this one, in whose place it comes."""
    return {
        "arguments": [each for each in arguments if not each.startswith((CONTEXT, LANGUAGE))],
        "variables": {**os.environ, "PWD": os.getcwd()},  # it is set by bash, which Ray's own program executes
        "folder": os.getcwd(),
        "files": resource.getrlimit(resource.RLIMIT_NOFILE),
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    }


if __name__ == "__main__":
    main(sys.argv[1:])

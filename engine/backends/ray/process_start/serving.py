"""The fork server's own process. It computes nothing, so that no thread of torch has work when it forks."""

from __future__ import annotations

import gc
import importlib
import json
import os
import resource
import runpy
import select
import shutil
import signal
import socket
import sys
from typing import Any, NoReturn

import torch

from .start_worker import FORK

RAYS_OWN = (
    "ray.actor",
    "ray._private.node",
    "ray._private.async_compat",
    "ray._private.runtime_env.setup_hook",
    "fedfleet.engine.backends.ray.driver_actor",
)
"""What the processes import beside the worker's modules."""
JOB, NO_JOB = "RAY_JOB_ID", "ffffffff"
"""The variable with the job that a process is for, and its value for processes that Ray starts before there is a job.
They get theirs from the first task. All forked processes are of this kind, since Ray reads it when it is imported."""


def serve(listening: int, control: int, path: list[str]) -> None:
    """Fork processes for Ray until the process that has started this one ends.

    listening: the socket of the requests. control: a socket that is at its end when that process has ended. path: where
    a new process looks for modules; this one looks where the process does that has started it.
    """
    listener = socket.socket(fileno=listening)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system forgets processes that have ended
    importlib.import_module("fedfleet.engine.backends.ray.worker_process")
    settings: dict[str, str] | None = None
    while control not in select.select([listener, control], [], [])[0]:
        line, _ = listener.accept()
        with line:
            try:
                streams, request = received(line)
            except (OSError, ValueError):  # it broke off
                continue
            if settings is None:
                settings = rays(request["variables"])
                load(request["variables"], path)
            if settings == rays(request["variables"]) and os.fork() == 0:
                listener.close()
                os.close(control)
                become(request, streams, line)
        for stream in streams:
            os.close(stream)
    shutil.rmtree(os.path.dirname(listener.getsockname()), ignore_errors=True)


def rays(variables: dict[str, str]) -> dict[str, str]:
    """Ray's settings among environment variables, with the node that a process is for."""
    return {name: value for name, value in variables.items() if name.startswith("RAY_") and name != JOB}


def load(variables: dict[str, str], path: list[str]) -> None:
    """Import Ray as a new process would. Ray reads its settings when it is imported, so that this waits for the first
    request, and a process with other settings is not forked."""
    os.environ.update(variables | {JOB: NO_JOB})
    sys.path[:] = path
    for module in RAYS_OWN:
        importlib.import_module(module)
    gc.freeze()  # what is imported lives as long as the processes


def received(line: socket.socket) -> tuple[list[int], dict[str, Any]]:
    """The standard streams of the process that is asked for, and the request."""
    _, streams, *_ = socket.recv_fds(line, len(FORK), 3)
    parts = []
    while part := line.recv(65536):
        parts.append(part)
    return streams, json.loads(b"".join(parts))


def become(request: dict[str, Any], streams: list[int], line: socket.socket) -> NoReturn:
    """Answer, and go on in this new process as Ray's own program would; it does not return."""
    with line:
        try:
            line.sendall(FORK)
        except OSError:  # it has waited too long and is being replaced
            os._exit(1)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])
    os.setpgid(0, 0)  # as Ray does, which may end the group of a process that has died
    resource.setrlimit(resource.RLIMIT_NOFILE, tuple(request["files"]))
    os.environ.clear()
    os.environ.update(request["variables"])
    os.chdir(request["folder"])
    torch.default_generator.seed()  # torch draws its seed when it is imported, and so all processes have the same
    sys.argv = request["arguments"]
    sys.path.insert(1, os.path.dirname(sys.argv[0]))  # Ray has put its own folder before it
    runpy.run_path(sys.argv[0], run_name="__main__")
    sys.exit()

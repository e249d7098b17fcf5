"""A client worker of the driver's node, as the driver holds it: an actor of Ray's, its bell, what tells of its life."""

from __future__ import annotations

import os
import signal
import time
from typing import Any, NamedTuple

import ray
from ray.exceptions import OutOfMemoryError, RayActorError, RayError, RayTaskError

from ...config.memory_errors import memory_remedy
from ...config.run_spec import RunSpec
from ...config.schema import WorkerGroup
from ...errors import WorkerUnfit
from ..base import Failure
from .wakeup import Bell


class Seat(NamedTuple):
    """`pid` and `end` are references, to its process's number and to what it ends by; `stack` is the handle of the file
    for its stack."""

    actor: Any
    number: int
    bell: Bell
    pid: Any
    end: Any
    stack: int
    group: WorkerGroup
    bundle: int  # of the run's room
    tries: int = 0  # processes before it, in a row, that died as they started

    @property
    def name(self) -> str:
        try:
            return f"worker {self.number}, process {ray.get(self.pid, timeout=0)}"
        except RayError:
            return f"worker {self.number}"

    def up(self, seconds: float) -> bool:
        """Whether it has started, `seconds` from now at most. RayError: it died of that."""
        if not ray.wait([self.pid], timeout=seconds)[0]:
            return False
        ray.get(self.pid)
        self.bell.taken()
        return True

    def told(self) -> str:
        """Its stack: what the worker is doing, by its own account; Python need not be running for it."""
        try:
            os.kill(ray.get(self.pid, timeout=1), signal.SIGUSR1)
        except (OSError, RayError):
            return "(it does not answer)"
        deadline, size = time.monotonic() + 2, -1
        while time.monotonic() < deadline and (size <= 0 or os.fstat(self.stack).st_size != size):
            size = os.fstat(self.stack).st_size
            time.sleep(0.05)
        return os.pread(self.stack, max(size, 0), 0).decode(errors="replace") or "(it does not answer)"

    def kill(self) -> None:
        """Gone when this returns, or as good as: a worker that writes on could spoil a later task."""
        try:
            os.kill(ray.get(self.pid, timeout=1), signal.SIGKILL)
        except (OSError, RayError):
            ray.kill(self.actor)

    def leave(self) -> None:
        ray.kill(self.actor)
        os.close(self.stack)
        self.bell.close()


def why_unfit(error: Exception) -> str:
    """Of what came of a worker's start: why no other process would do better there; "" where it was killed, or its node
    is gone."""
    if isinstance(error, RayTaskError) and isinstance(error.cause, WorkerUnfit):
        return str(error.cause)
    return said(error) if isinstance(error, RayActorError) and error.actor_init_failed else ""


def death(error: Exception, run_spec: RunSpec) -> Failure:
    """A task's failure by its worker's death, as Ray tells it; with what to change where memory may be the reason."""
    if isinstance(error, OutOfMemoryError):
        return Failure("the worker died: Ray ended it, for its machine's memory ran out", "", kind="memory")
    cause = f"the worker died: {type(error).__name__}"
    if any(word in str(error) for word in ("OOM", "SIGKILL", "crashed")):
        cause += (
            f" (it crashed or was killed, as the kernel does where memory runs out: then, {memory_remedy(run_spec)})"
        )
    return Failure(cause, "")


def death_at_start(error: Exception, run_spec: RunSpec) -> str:
    """A worker's that had no task yet, for a log."""
    found = death(error, run_spec)
    return f"{found.cause}; {memory_remedy(run_spec)}" if found.kind == "memory" else f"{found.cause}, {said(error)}"


def said(error: Exception) -> str:
    """The last line of an error of Ray's, which tells most."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1][:300]}" if lines else type(error).__name__

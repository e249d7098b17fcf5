"""A worker as its pool sees it: how it is started, what it has to do, and what its death means."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import ray
from ray.exceptions import OutOfMemoryError, RayActorError, RayError, RayTaskError

from ...config.schema import WorkerGroup
from ...errors import WorkerUnfit
from ...kernels.library import SECONDS as BUILD_SECONDS
from ...rounds.pool import Failure
from .placement import on_node
from .scheduler import Waiting
from .shared_sums import FilesOfWorker, Places
from .worker_process import SIGNS, STACK_SECONDS, Reply, Started, StateFiles, WorkerProcess, last_stack

ASKED_SECONDS = 5.0
"""A process that has not asked its workers for signs of life for so long was busy or stopped itself."""
START_SECONDS = 120.0
"""The seconds that a worker may take to start, if engine.patience is less."""


class WorkerRequest(NamedTuple):
    """The settings with which a worker is started: its group, and Ray's scheduling strategy that says where.
    node: Ray's id of the node that was chosen."""

    group: WorkerGroup
    strategy: Any
    node: str


@dataclass(eq=False)
class WorkerCall:
    """A call of a worker, with its tasks. moves: whether rows come with it from another node. file: the number of the
    worker's file for its sums. answer: the reference to its reply."""

    worker: WorkerHandle
    items: list[Waiting]
    moves: bool
    file: int | None = None
    answer: Any = None

    def reply(self) -> Reply:
        """The reply to the call, with its sums. Raises what Ray raises."""
        places: Places | None = None
        try:
            reply: Reply = ray.get(self.answer)
            places = reply.places
        finally:
            if self.worker.sum_files is not None and self.file is not None and places is None:
                self.worker.sum_files.free.append(self.file)
        if self.worker.sum_files is None or self.file is None or places is None:
            return reply
        return reply._replace(sums=self.worker.sum_files.read(self.file, places))


@dataclass(eq=False)
class WorkerHandle:
    """One worker. start: a reference to its `Started`. tries: the number of its processes that died in a row while
    they started. node: the run's number of its node, see `RowLocations`. host: the node in words where it is not
    the driver's. leaves: of the broadcast as the worker has them. beats, heard: its signs of life, and when they
    were last seen to grow (time.monotonic). asked: when they were asked for. sign: a reference to the next answer.
    hung: whether its process was ended because it hung. sum_files: see shared_sums.py, for a worker on the driver's
    node."""

    actor: Any
    number: int
    request: WorkerRequest
    start: Any
    tries: int
    started: Started | None = None
    node: int = 0
    host: str = ""
    calls: list[WorkerCall] = field(default_factory=list)
    leaves: list[np.ndarray] = field(default_factory=list)
    beats: int = 0
    heard: float = field(default_factory=time.monotonic)
    asked: float = 0.0
    sign: Any = None
    hung: bool = False
    sum_files: FilesOfWorker | None = None

    @staticmethod
    def of(
        given: Sequence[Any], files: StateFiles, request: WorkerRequest, number: int, tries: int = 0
    ) -> WorkerHandle:
        """Start a worker. given: the run, and references to training set, test set, client index and frozen tensors."""
        group = request.group
        options: dict[str, Any] = {"num_cpus": group.cpus, "num_gpus": group.gpus, "resources": group.resources}
        options |= {"concurrency_groups": {SIGNS: 1}, "scheduling_strategy": request.strategy}
        remote: Any = ray.remote(**options)(WorkerProcess)
        actor = remote.remote(*given, files, number)
        return WorkerHandle(actor, number, request, actor.ready.remote(), tries)

    @property
    def name(self) -> str:
        process = f", process {self.started.process}" if self.started is not None else ""
        return f"worker {self.number}{process}" + (f" on node {self.host}" if self.host else "")

    def is_dead(self, error: RayError) -> bool:
        """Whether an error says that this worker has died, and not another one."""
        return isinstance(error, OutOfMemoryError) or getattr(error, "actor_id", None) == self.actor._actor_id.hex()

    def lives(self) -> None:
        """Something was heard of the worker."""
        self.heard = time.monotonic()

    def silent_for(self) -> float:
        """The seconds since the last sign of life; asks for the next one, and does not wait for it. It counts from now
        if nobody has asked for a while."""
        if (now := time.monotonic()) > self.asked + ASKED_SECONDS:
            self.lives()
        self.asked = now
        if self.sign is not None and ray.wait([self.sign], timeout=0)[0]:
            try:
                beats: Any = ray.get(self.sign)
            except RayError:  # it has died, as its calls will say
                beats = -1
            if beats != self.beats:
                self.beats = beats
                self.lives()
            self.sign = None
        if self.sign is None and self.started is not None:
            self.sign = self.actor.seen.remote()
        return now - self.heard

    def end_hung(self) -> str:
        """End the process, and return its stack. It goes at once: a worker that goes on could spoil a later task."""
        self.hung = True
        found: Any = "(it does not answer)"
        if self.started is not None and not self.host:
            found = last_stack(self.started.process, self.started.stack)
        elif self.started is not None:
            remote: Any = ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=on_node(self.started.node))
            try:
                stack = remote(last_stack).remote(self.started.process, self.started.stack)
                found = ray.get(stack, timeout=STACK_SECONDS + START_SECONDS)
            except RayError:
                found = "(its node does not answer)"
        ray.kill(self.actor)
        return found


def start_seconds(compiled: bool) -> float:
    """The seconds that a worker may take to start. compiled: whether it may have to build the kernels."""
    return START_SECONDS + (BUILD_SECONDS if compiled else 0.0)


def why_unfit(error: Exception) -> str:
    """Why no other process could start there either, from the error with which a worker's start ended; "" if the worker
    was killed or its node is gone."""
    if isinstance(error, RayTaskError) and isinstance(error.cause, WorkerUnfit):
        return str(error.cause)
    return last_error_line(error) if isinstance(error, RayActorError) and error.actor_init_failed else ""


def death(error: Exception, remedy: str) -> Failure:
    """The failure for the death of a worker, as Ray reports it. remedy: what it says if memory may be the reason."""
    if isinstance(error, OutOfMemoryError):
        cause = "the worker died: Ray ended it, because its machine's memory ran out"
        return Failure(None, cause, "", kind="memory")
    cause = f"the worker died: {type(error).__name__}"
    if any(word in str(error) for word in ("OOM", "SIGKILL", "crashed")):
        cause += f" (it crashed or was killed, as the kernel does where memory runs out: then, {remedy})"
    return Failure(None, cause, "")


def death_at_start(error: Exception, remedy: str) -> str:
    """Why a worker died that had no task yet, for a log. remedy: as for `death`."""
    found = death(error, remedy)
    return f"{found.cause}; {remedy}" if found.kind == "memory" else f"{found.cause}, {last_error_line(error)}"


def last_error_line(error: Exception) -> str:
    """The last line of an error of Ray, which has the cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1][:300]}" if lines else type(error).__name__

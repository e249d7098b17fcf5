"""Tasks run in this process, one after the other."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from ..clients.worker import Data, Worker
from ..cohorts.tasks import Broadcast
from ..config.run_spec import RunSpec
from ..errors import FedFleetError, WorkerUnfit
from ..memory import release_freed_memory
from ..planning.kernel_proof import prove_here
from ..reduction.tree import PartialSum, TaskResult
from ..state.row_files import StateLayout
from .base import Call, Failure, failure


class InProcess:
    """One worker, here. beat: called before every local step; may raise to stop."""

    def __init__(self, run_spec: RunSpec, data: Data, place: StateLayout, beat: Callable[[], None]) -> None:
        prove_here(run_spec, data)
        self.worker = Worker(run_spec, data, place, beat)
        self.beat = beat
        self.waiting: deque[Any] = deque()

    def start(self, call: Call, shared: Broadcast) -> None:
        self.call, self.shared = call, shared

    def put(self, task: Any) -> None:
        self.waiting.append(task)

    def go(self) -> None:
        pass

    def get(self) -> tuple[Any, TaskResult | Failure]:
        self.beat()
        task = self.waiting.popleft()
        try:
            return task, getattr(self.worker, self.call)(task, self.shared)
        except FedFleetError:
            raise
        except Exception as error:  # a method's, a workload's or a plug-in's, of whatever kind
            found = failure(error, "this process")
            if found.kind != "memory":  # its frames hold what there is too little of
                found = found._replace(error=error)
        if found.kind == "memory":
            release_freed_memory()
        if found.kind == "worker":
            raise WorkerUnfit(f"clients cannot be run here: {found.cause}; install what is missing") from found.error
        return task, found

    def rest(self) -> Iterable[PartialSum]:
        return ()

    def facts(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        """Let go of the data now: driver and fleet refer to each other, and the garbage collector takes its time."""
        del self.worker

"""The fleet as the driver sees it, and the one that runs in the driver's own process: no Ray, the same bits."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple, Protocol

from ..cohorts.tasks import Broadcast
from ..errors import RemoteCause, full_traceback
from ..kernels.library import NoKernels
from ..memory import is_out_of_memory
from ..reduction.tree import PartialSum, TaskResult
from ..user_code import error_summary

Call = Literal["train", "evaluate"]


Kind = Literal["client", "memory", "worker"]


class Failure(NamedTuple):
    """Why a task failed. `cause`: in a sentence; `trace`: the whole traceback, "" for a worker that died; `error`: the
    exception, where it was raised in this process. kind: "client" where its clients may be to blame; "memory" where
    memory ran out; "worker" where the worker's environment is, which fleets deal with: the worker is given up, the task
    runs elsewhere. worker: the number of the worker that says so, -1 where a fleet does."""

    cause: str
    where: str
    trace: str = ""
    error: BaseException | None = None
    kind: Kind = "client"
    worker: int = -1

    def reason(self) -> BaseException | None:
        """The `__cause__` of an error about it."""
        return self.error or (RemoteCause(self.trace) if self.trace else None)

    @property
    def told(self) -> str:
        """For the log."""
        return f"{self.where}: {self.cause}" + (f"\n{self.trace}" if self.trace else "")


def failure(error: Exception, where: str, worker: int = -1) -> Failure:
    """What a method, a workload or a plug-in raised while a task ran, as it travels to another process."""
    kind: Kind = "memory" if is_out_of_memory(error) else "worker" if environmental(error) else "client"
    return Failure(error_summary(error)[:2000], where, full_traceback(error), None, kind, worker)


def environmental(error: BaseException) -> bool:
    """Whether an exception is of the machine that it was raised on, whatever the client: a package or the kernels are
    not there."""
    return isinstance(error, ImportError | NoKernels)


class Fleet(Protocol):
    """Runs tasks of one phase at a time. Tasks may be run again: the same task gives the same result."""

    def start(self, call: Call, shared: Broadcast) -> None:
        """Begin a phase: tasks that are put from now on are `call`s that read `shared`."""
        ...

    def put(self, task: Any) -> None: ...

    def go(self) -> None:
        """Have what was put begun, where others than this process do it."""
        ...

    def get(self) -> tuple[Any, TaskResult | Failure]:
        """Wait for a task that is over, well or badly."""
        ...

    def rest(self) -> Iterable[PartialSum]:
        """Once all tasks are over: the sums that did not come with their results."""
        ...

    def facts(self) -> dict[str, float]:
        """For the round's record: what there is to say since the last time."""
        ...

    def close(self) -> None: ...

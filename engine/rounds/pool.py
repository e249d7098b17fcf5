"""The interface between the driver and whatever runs its tasks: phases, pools, and failures of tasks.

The driver is a generator. It yields a phase, and is sent the results once the phase has begun.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from ..cohorts.tasks import Broadcast, TrainingTask
from ..errors import RemoteCause, full_traceback
from ..kernels.library import NoKernels
from ..memory import is_device_full, is_out_of_memory
from ..reduction.tree import PartialSum, TaskResult, TreeShape
from ..user_code import error_summary

Call = Literal["train", "evaluate", "aggregate"]
Kind = Literal["client", "memory", "device", "worker"]
CAUSE_CHARACTERS = 2000
"""The largest number of characters of a failure's cause; the traceback has the whole text."""


@dataclass(frozen=True)
class Failure:
    """A task that raised an exception, or whose worker died or hung.

    task: None while the failure travels between processes. cause: the exception in one sentence. where: the worker, for
    the log. trace: the whole traceback; "" for a worker that died. error: the exception, where it was raised in this
    process. kind: "client" where the task's clients may be to blame; "memory" where memory ran out, "device" where that
    of a device did, such as a GPU; "worker" where the worker's environment is to blame, which pools deal with
    themselves: they give the worker up and run the task elsewhere. worker: the number of the worker that reports it; -1
    where the pool does.
    """

    task: Any
    cause: str
    where: str
    trace: str = ""
    error: BaseException | None = None
    kind: Kind = "client"
    worker: int = -1

    @property
    def reason(self) -> BaseException | None:
        """The `__cause__` of an error about this failure."""
        return self.error or (RemoteCause(self.trace) if self.trace else None)

    @property
    def for_memory(self) -> bool:
        """Whether it failed because memory ran out, of the machine or of a device."""
        return self.kind in ("memory", "device")

    @property
    def for_log(self) -> str:
        """The worker, the cause, and the traceback in the lines below."""
        return f"{self.where}: {self.cause}" + (f"\n{self.trace}" if self.trace else "")


def failure_of(task: Any, error: BaseException, where: str, worker: int = -1) -> Failure:
    """The failure of a task by an exception that a method, a workload or a plug-in raised. It can be pickled."""
    kind: Kind = "worker" if environmental(error) else "client"
    if is_out_of_memory(error):
        kind = "device" if is_device_full(error) else "memory"
    return Failure(task, error_summary(error)[:CAUSE_CHARACTERS], where, full_traceback(error), None, kind, worker)


def environmental(error: BaseException) -> bool:
    """Whether an exception is due to the machine on which it was raised, and not to the client: a package or the
    kernels are missing there."""
    return isinstance(error, ImportError | NoKernels)


Further = Callable[[int], Sequence[Any]]
"""Called with a number n, it returns up to n further tasks of the phase under way, which can run at once. A pool asks
whenever its workers would soon be without a task, and the phase ends when there is none and no task is under way.
Before it returns, the phase's broadcast may get more leaves, or others in the place of those that no task under way
reads."""


@dataclass(frozen=True)
class Phase:
    """Tasks that all do the same: the local training of one round's cohort, a pass over its messages, or an evaluation.

    broadcast: what every task reads. shape: the tree in whose order the pool may add the sums of the tasks' results;
    None if each result shall come with its own. repeated: these tasks, or parts of them, have run before in this round
    and failed. further: where the tasks are not all known when the phase begins, it gives the others.
    """

    call: Call
    tasks: Sequence[Any]
    broadcast: Broadcast
    shape: TreeShape | None = None
    repeated: bool = False
    further: Further | None = None

    def again(self, tasks: Sequence[Any]) -> Phase:
        """The phase that runs some of these tasks, or parts of them, once more."""
        return replace(self, tasks=tasks, shape=None, repeated=True, further=None)


Outcome = TaskResult | Failure | PartialSum
Results = Iterator[TaskResult | PartialSum]
"""The results of all tasks of a phase, in any order, and the sums that do not come with their results."""
Returned = TypeVar("Returned")
Phases = Generator[Phase, Results, Returned]
"""It yields phases, and is sent the results of each."""


class Pool(ABC):
    """Runs the tasks of one phase at a time. A task gives the same result wherever, and however often, it runs."""

    @abstractmethod
    def run_phase(self, phase: Phase) -> Iterator[Outcome]:
        """Begin the phase's tasks, and return an iterator over their outcomes.

        Every task has one TaskResult or one Failure, in any order. A task that a pool splits has several TaskResults,
        one for each branch of the task's tree. A result whose `leaves` are None has its sums in one of the PartialSums,
        which only a phase with a `shape` has.
        """

    def ahead(self, tasks: Callable[[], Sequence[TrainingTask]]) -> None:  # noqa: B027 most pools prepare nothing
        """While a phase of local training is under way, prepare the tasks of the next one, as far as they are known.
        tasks: gives them, but for the rows of clients' states."""

    def facts(self) -> dict[str, float]:
        """Columns for the round's record, counted since the last call."""
        return {}

    def unfinished(self) -> int:
        """The number of tasks of the phase under way that have no result yet. Another thread may ask."""
        return 0

    @abstractmethod
    def close(self) -> None:
        """Stop the workers."""


def played(steps: Generator[Any, Any, Returned], run: Callable[[Phase], Results]) -> Generator[Any, None, Returned]:
    """The steps of a driver whose phases are run by `run`. What that raises is raised in the driver."""
    step: Callable[[Any], Any] = steps.send
    given: Any = None
    with closing(steps):
        while True:
            try:
                item = step(given)
            except StopIteration as end:
                return end.value
            step, given = steps.send, None
            if not isinstance(item, Phase):
                yield item
                continue
            try:
                given = run(item)
            except BaseException as error:
                step, given = steps.throw, error


def finished(phases: Phases[Returned], run: Callable[[Phase], Results]) -> Returned:
    """What a generator of nothing but phases returns, after they have been run."""
    playing = played(phases, run)
    try:
        next(playing)
    except StopIteration as end:
        return end.value
    raise AssertionError

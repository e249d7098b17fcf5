"""The pool that runs tasks in the driver's own process: no Ray, the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from ..accelerators.faults import is_device_lost
from ..accelerators.memory import state_budget
from ..clients.worker import Data, Worker
from ..cohorts.tasks import TrainingTask
from ..errors import RAISED_BY_USERS, DeviceLost, FedFleetError, WorkerUnfit, type_and_first_line
from ..memory import release_freed_memory
from ..planning.kernel_proof import prove_here
from ..rounds.pool import Failure, Outcome, Phase, Pool, failure_of
from ..run_spec import RunSpec
from ..state.resident_rows import ResidentRows
from ..state.row_files import RowFiles, StateLayout
from ..state.row_table import RowTable

T = TypeVar("T")
Begun = Callable[[], Outcome]
"""Gives the outcome of a task that has begun."""


class LocalPool(Pool):
    """One worker, in this process."""

    def __init__(self, run_spec: RunSpec, data: Data, layout: StateLayout, beat: Callable[[], None]) -> None:
        """beat: called before every task and every local step; it may raise an exception to stop the run."""
        prove_here(run_spec, data)
        self.worker = Worker(run_spec, data, layout, beat)
        self.beat = beat
        self.ahead_of_device = self.worker.device.type != "cpu"  # whether tasks begin before others have ended

    def keep_rows(self, table: RowTable) -> None:
        """Keep rows of client states in the worker's memory between rounds, as far as `engine.state_memory` allows."""
        rows, device, given = self.worker.rows, self.worker.device, self.worker.run_spec.experiment.engine.state_memory
        on_device = device.type == "cuda" if given == "auto" else given > 0
        if on_device and isinstance(rows, RowFiles):
            most = partial(state_budget, device) if given == "auto" else lambda: int(given * 2**30)
            self.worker.rows = kept = ResidentRows(rows, table.layout.capacity, device, most)
            table.write_rows_back, table.on_restored = kept.write_back, kept.forget

    def run_phase(self, phase: Phase) -> Iterator[Outcome]:
        tasks = tasks_of(phase)
        return self._outcomes(phase, tasks, self._begun(phase, tasks) if self.ahead_of_device else None)

    def _outcomes(self, phase: Phase, tasks: Iterator[Any], begun: Begun | None) -> Iterator[Outcome]:
        """The outcomes of tasks, one after another. begun: the first one, if it has begun. Where a device computes, the
        next one begins before the processor waits for the last one's result."""
        begun = begun or self._begun(phase, tasks)
        while begun is not None:
            later = self._begun(phase, tasks) if self.ahead_of_device and phase.further is None else None
            yield begun()
            begun = later or self._begun(phase, tasks)

    def _begun(self, phase: Phase, tasks: Iterator[Any]) -> Begun | None:
        """Begin the next task. Returns what gives its outcome, and raises what has been raised here; None if there is
        no further task."""
        if (task := next(tasks, None)) is None:
            return None
        try:
            self.beat()
            result = self._tried(task, partial(self.worker.launch, phase.call, task, phase.broadcast))
        except BaseException as error:
            return partial(raise_again, error)
        return partial(self._tried, task, result) if callable(result) else lambda: result

    def _tried(self, task: Any, call: Callable[[], T]) -> T | Failure:
        """What a call returns that a task needs, or the failure of the task."""
        try:
            return call()
        except FedFleetError:
            raise
        except RAISED_BY_USERS as error:  # whatever a method, a workload or a plug-in raises
            if is_device_lost(error):
                raise DeviceLost(
                    f"{self.worker.device} failed under this process ({type_and_first_line(error)}); start again, "
                    "or resume the run if it has a checkpoint; on Ray, a worker that loses its device is replaced"
                ) from error
            outcome = failure_of(task, error, "this process")
            # The error's frames would keep the memory that is lacking. In a run that goes on they would keep what each
            # failed task has, and the data after its end, since frames and error refer to each other.
            if not outcome.for_memory and self.worker.run_spec.experiment.engine.on_failure == "fail":
                outcome = replace(outcome, error=error)
        if outcome.for_memory:
            self.ahead_of_device = False  # two tasks at once take more memory than one
            release_freed_memory()
            self.make_room()
        if outcome.kind == "worker":
            why = f"clients cannot be run here: {outcome.cause}; install what is missing"
            raise WorkerUnfit(why) from outcome.reason
        return outcome

    def ahead(self, tasks: Callable[[], Sequence[TrainingTask]]) -> None:
        if self.ahead_of_device:
            try:
                self.worker.prepare([task for task in tasks() if len(task.clients)])
            except RuntimeError:  # memory is short, or the device fails, as the tasks under way will find out
                self.worker.prepared = {}

    def make_room(self) -> None:
        """Give the memory that rows of client states take to what runs there."""
        if isinstance(self.worker.rows, ResidentRows) and self.worker.rows.matrices:
            self.worker.rows.leave()
            release_freed_memory()

    def close(self) -> None:
        """Release the data now: driver and pool refer to each other, and the garbage collector may take long."""
        on_device = self.worker.device.type != "cpu"
        if isinstance(self.worker.rows, ResidentRows):
            self.worker.rows.matrices = []  # the table refers to it
        del self.worker
        if on_device:
            release_freed_memory()


def raise_again(error: BaseException) -> Outcome:
    raise error


def tasks_of(phase: Phase) -> Iterator[Any]:
    """The tasks of a phase, and then the further ones, one at a time."""
    yield from phase.tasks
    while phase.further is not None and (tasks := phase.further(1)):
        yield from tasks

"""The pool that runs tasks in the driver's own process: no Ray, the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from ..accelerators.faults import is_device_lost
from ..accelerators.memory import state_budget
from ..clients.worker import Data, Worker
from ..errors import RAISED_BY_USERS, DeviceLost, FedFleetError, WorkerUnfit, type_and_first_line
from ..memory import release_freed_memory
from ..planning.kernel_proof import prove_here
from ..rounds.pool import Failure, Outcome, Phase, Pool, failure_of
from ..run_spec import RunSpec
from ..state.resident_rows import ResidentRows
from ..state.row_files import RowFiles, StateLayout
from ..state.row_table import RowTable


class LocalPool(Pool):
    """One worker, in this process."""

    def __init__(self, run_spec: RunSpec, data: Data, layout: StateLayout, beat: Callable[[], None]) -> None:
        """beat: called before every task and every local step; it may raise an exception to stop the run."""
        prove_here(run_spec, data)
        self.worker = Worker(run_spec, data, layout, beat)
        self.beat = beat

    def keep_rows(self, table: RowTable) -> None:
        """Keep rows of client states in the worker's memory between rounds, as far as `engine.state_memory` allows."""
        rows, device, given = self.worker.rows, self.worker.device, self.worker.run_spec.experiment.engine.state_memory
        on_device = device.type == "cuda" if given == "auto" else given > 0
        if on_device and isinstance(rows, RowFiles):
            most = partial(state_budget, device) if given == "auto" else lambda: int(given * 2**30)
            self.worker.rows = kept = ResidentRows(rows, table.layout.capacity, device, most)
            table.write_rows_back, table.on_restored = kept.write_back, kept.forget

    def run_phase(self, phase: Phase) -> Iterator[Outcome]:
        for task in tasks_of(phase):
            self.beat()
            try:
                outcome: Outcome = self.worker.perform(phase.call, task, phase.broadcast)
            except FedFleetError:
                raise
            except RAISED_BY_USERS as error:  # whatever a method, a workload or a plug-in raises
                if is_device_lost(error):
                    raise DeviceLost(
                        f"{self.worker.device} failed under this process ({type_and_first_line(error)}); start again, "
                        "or resume the run if it has a checkpoint; on Ray, a worker that loses its device is replaced"
                    ) from error
                outcome = failure_of(task, error, "this process")
                if not outcome.for_memory:  # otherwise the error's frames would keep the memory that is lacking
                    outcome = replace(outcome, error=error)
            if isinstance(outcome, Failure):
                if outcome.for_memory:
                    release_freed_memory()
                    self.make_room()
                if outcome.kind == "worker":
                    why = f"clients cannot be run here: {outcome.cause}; install what is missing"
                    raise WorkerUnfit(why) from outcome.error
            yield outcome

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


def tasks_of(phase: Phase) -> Iterator[Any]:
    """The tasks of a phase, and then the further ones, one at a time."""
    yield from phase.tasks
    while phase.further is not None and (tasks := phase.further(1)):
        yield from tasks

"""A run in this process: its data, its execution plan, its driver and its pool."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import partial

from ...workloads.workload import Split, taken_notes
from ..accelerators import settings
from ..accelerators.choice import device_line
from ..accelerators.memory import bounded_memory
from ..backends.local import LocalPool
from ..clients.worker import Data
from ..planning.autotune import measure
from ..planning.data import checked_split
from ..planning.execution_plan import plan_execution
from ..records.history import Event
from ..rounds.driver import Driver
from ..rounds.pool import Phase, Results
from ..rounds.under_way import Outcome, UnderWay
from ..run_spec import RunSpec
from ..state.row_table import RowTable
from ..stopping import at_once, check
from ..workload.split import unused_rows


class Host:
    """What a run gets from its process, which executes no other run at the same time."""

    def split(self, run_spec: RunSpec) -> Split:
        """The data and the rows of every client, see `checked_split`."""
        return checked_split(run_spec)

    def plan(self, run_spec: RunSpec, split: Split) -> tuple[RunSpec, str]:
        """The run specification with its execution plan, and a line for the log."""
        return plan_execution(run_spec, split, measure)

    def steps(self, driver: Driver) -> Iterator[Event | Phase]:
        """The events of a driver, and those phases that the pool of the driver shall not run at once."""
        return driver.rounds()

    def execute(
        self, run_spec: RunSpec, stop: Callable[[], int], under_way: UnderWay
    ) -> Generator[Event | Phase, Results | None, Outcome]:
        """Execute a run. Yields what `steps` yields.

        It has torch's settings of the run while it computes, and its caller has those of the caller.
        """
        return settings.in_turns(self._execute(run_spec, stop, under_way), run_spec.computing)

    def _execute(
        self, run_spec: RunSpec, stop: Callable[[], int], under_way: UnderWay
    ) -> Generator[Event | Phase, Results | None, Outcome]:
        beat = partial(check, stop)
        with bounded_memory(run_spec.device, run_spec.experiment.engine.gpus):
            split = self.split(run_spec)
            beat()
            with at_once(stop):  # a measurement and proofs take seconds, and nothing is lost yet
                run_spec, plan_line = self.plan(run_spec, split)
            with driver_here(run_spec, split, beat) as driver:
                device = device_line(run_spec.experiment.engine, run_spec.device)
                for line in (plan_line, device, *taken_notes(), *filter(None, [run_spec.method().caution])):
                    driver.log(line)
                if run_spec.device.type == "cuda" and (clause := settings.workspace_clause()):
                    driver.log(clause)
                if unused := unused_rows(split):
                    driver.log(unused)
                driver.asked_to_end = lambda: under_way.reason
                with under_way.going_on(driver.tensors):
                    yield from self.steps(driver)
                return driver.outcome()


@contextmanager
def driver_here(run_spec: RunSpec, split: Split, beat: Callable[[], None] = lambda: None) -> Iterator[Driver]:
    """The driver of a run with a pool in this process. Both are closed at the end, and what the driver has is released.
    beat: see `LocalPool`."""
    data = Data.of(split.train, split.test, split.client_index)
    driver = Driver(run_spec, split.client_index, len(next(iter(split.test.values()))))

    def pool(table: RowTable) -> LocalPool:
        made = LocalPool(run_spec, data, table.layout, beat)
        made.keep_rows(table)
        return made

    try:
        driver.start(pool)
        yield driver
    finally:
        driver.close()
        vars(driver).clear()  # its parts refer to it, and the collector of garbage may take long

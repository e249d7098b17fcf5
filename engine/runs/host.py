"""What a run in this process gets from it: its data, its execution plan, its pool and its driver."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ...workloads.workload import Split
from ..backends.local import LocalPool
from ..clients.worker import Data
from ..planning.autotune import measure
from ..planning.data import checked_split
from ..planning.execution_plan import plan_execution
from ..rounds.driver import DataSummary, Driver
from ..rounds.pool import Pool
from ..run_spec import RunSpec
from ..state.row_files import StateLayout


class Host:
    """A process with one run."""

    def split(self, run_spec: RunSpec) -> Split:
        """The data and the rows of every client, see `checked_split`."""
        return checked_split(run_spec)

    def plan(self, run_spec: RunSpec, split: Split) -> tuple[RunSpec, str]:
        """The run specification with its execution plan, and a line for the log."""
        return plan_execution(run_spec, split, measure)

    def pool(self, run_spec: RunSpec, data: Data, layout: StateLayout, beat: Callable[[], None]) -> Pool:
        """The pool of the run."""
        return LocalPool(run_spec, data, layout, beat)

    @contextmanager
    def driver(self, run_spec: RunSpec, split: Split, beat: Callable[[], None] = lambda: None) -> Iterator[Driver]:
        """The driver of a run with its pool, both of which are closed at the end. beat: see `LocalPool`."""
        data = Data.of(split.train, split.test, split.client_index)
        driver = Driver(run_spec, DataSummary(split.client_index, len(next(iter(split.test.values())))))
        try:
            driver.start(lambda table: self.pool(run_spec, data, table.layout, beat))
            yield driver
        finally:
            driver.close()

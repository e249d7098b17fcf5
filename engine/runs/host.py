"""What a run in this process gets from it: its data, its execution plan and its pool."""

from __future__ import annotations

from collections.abc import Callable

from ...workloads.workload import Split
from ..backends.local import LocalPool
from ..clients.worker import Data
from ..planning.autotune import measure
from ..planning.data import checked_split
from ..planning.execution_plan import plan_execution
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

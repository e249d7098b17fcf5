"""The interface between the executor and a source of runs, such as a search or a study."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from ...engine.planning.execution_plan import without_numbers
from ...engine.records.history import Record

HEARTBEAT_SECONDS = 0.5
"""The longest time until a process answers the driver, and the time between reports of a run without columns."""


class RunRequest(NamedTuple):
    """A run to execute.

    key: name of the run, unique in its source. experiment: plain data of the experiment. folder: for the run's files,
    on a file system that all nodes share. run_id: a new id if None. columns: the run reports after each round whose
    record has all of these columns, and then waits for the source's answer; if None, it reports about twice a second
    and does not wait. keep_model: whether the final model stays in the folder. may_end: whether an answer may end the
    run; if not, a run that shares its process with others does not wait for answers.
    """

    key: str
    experiment: dict[str, Any]
    folder: str
    run_id: str | None = None
    columns: tuple[str, ...] | None = None
    keep_model: bool = False
    may_end: bool = True

    @property
    def kind(self) -> str:
        """What runs have in common of which as many fit into a process: they differ in numbers of the method, in the
        partition and in the seed."""
        data = self.experiment
        workload, federation = data.get("workload"), data.get("federation", {})
        if isinstance(workload, dict):
            workload = {key: value for key, value in workload.items() if key != "partition"}
        sizes = [federation.get("cohort"), federation.get("local"), data.get("engine")]
        return json.dumps([without_numbers(data.get("method")), workload, sizes], sort_keys=True, default=repr)


class RunReport(NamedTuple):
    """What a run reports.

    rows: the records since the last report. status: running, finished, diverged or failed. reason: a sentence on why
    the run failed or diverged, else "".
    """

    rows: list[Record]
    status: str
    reason: str


class Source:
    """Hands out runs and receives their reports. The executor calls all methods in the main thread of the driver."""

    def next(self) -> RunRequest | None:
        """The next run, or None if there is none now: more may follow when another run has ended."""
        raise NotImplementedError

    def on_report(self, key: str, report: RunReport) -> bool:
        """A run has reported; returns whether to end it. The status of a run's last report is not `running`."""
        raise NotImplementedError

    @property
    def left(self) -> int:
        """About how many runs are still to be handed out, so that processes get equal shares of them."""
        raise NotImplementedError

    def on_process_death(self, key: str) -> None:
        """The process of a run died, and so did the process that tried the run again. No report follows."""
        raise NotImplementedError


DIED = "the run's process died, twice; it may have run out of memory"
"""The reason that a source gives for a run after `on_process_death`."""


def remove_resume_files(folder: Path) -> None:
    """Remove the states and checkpoints of a run that has ended. Its own process may have been killed before that."""
    for name in ("state", "checkpoints"):
        shutil.rmtree(folder / name, ignore_errors=True)

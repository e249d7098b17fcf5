"""A run that a source has asked for, as its process executes it, in a folder of its own.

An earlier process may have begun the run. If it has finished the run, the records are read from the folder. If it has
left a checkpoint, the run is resumed; else it begins again.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from ...engine.api import new_run, old_run
from ...engine.config.schema import experiment
from ...engine.errors import ConfigError, Diverged, Interrupted, InUse
from ...engine.records.lineage import lineage_of
from ...engine.rounds.driver import Record
from ...engine.run_spec import RunSpec
from ...engine.runs.host import Host
from ...engine.runs.launch import play
from ...engine.runs.observer import Observer
from ...engine.runs.run_directory import clear
from ...engine.runs.saved_files import read_rows
from ...engine.stopping import check
from ...engine.storage.lock import Lock, in_use_error, make_folders
from .source import HEARTBEAT_SECONDS, RunReport, RunRequest

ORPHAN_SECONDS = 60.0
"""How long to wait for the process of a driver that was killed. Such a process ends within a few seconds."""


class RequestedRun(Observer):
    """A run. A subclass says how its reports reach the driver."""

    host: Host | None = None
    """Of a run that shares its process with others."""

    def __init__(self, request: RunRequest) -> None:
        self.request = request
        self.asked = 0  # the signal by which the run is asked to end, 0 for none
        self.rows: list[Record] = []
        self.rounds = 0
        self.last = time.monotonic()

    def send(self, report: RunReport) -> None:
        """Send a report to the driver. The run waits for the answer to a report with the status `running` if it has
        columns."""
        raise NotImplementedError

    # --- an observer --------------------------------------------------------------------------------------------------
    def begin(self, run_spec: RunSpec) -> None:
        self.rounds = run_spec.last_round

    def resumed(self, records: list[Record]) -> None:
        self.rows[:] = records

    def record(self, record: Record) -> None:
        self.rows.append(record)
        columns = self.request.columns
        if columns is None:
            due = time.monotonic() - self.last > HEARTBEAT_SECONDS
        else:
            due = all(column in record for column in columns)
        if due and record["round"] < self.rounds:
            self._report("running")

    # --- the run ------------------------------------------------------------------------------------------------------
    def execute(self) -> None:
        """Execute the run, and report how it ended."""
        for _ in self.play():
            pass

    def play(self) -> Generator[Any, Any, None]:
        """The same for a run among others. Yields what `launch.play` does."""
        folder = Path(self.request.folder)
        try:
            with self._alone(folder):
                yield from self._run_or_read(folder)
                if not self.request.keep_model:
                    (folder / "model.safetensors").unlink(missing_ok=True)
        except Interrupted:
            pass  # nobody waits for a report any more
        except Diverged as error:
            self._report("diverged", str(error))
        except Exception as error:  # an error of a method, workload or plug-in ends only its run
            reason = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
            self._report("failed", " ".join(reason.split()))
        else:
            self._report("finished")
            return
        gc.collect()  # the frames of the error refer to each other, and have the data and states of the run

    def _run_or_read(self, folder: Path) -> Generator[Any, Any, None]:
        """Begin the run, resume it, or read the records if it has finished."""
        if (folder / "result.json").is_file():
            self.rows = read_rows(folder / "rounds.parquet")
            return
        wanted = experiment(self.request.experiment)
        if wanted.checkpoint.last == "auto":  # nobody makes one of many runs longer
            checkpoint = wanted.checkpoint.model_copy(update={"last": False})
            wanted = wanted.model_copy(update={"checkpoint": checkpoint})
        if (folder / "run.json").is_file() and any((folder / "checkpoints").glob("round-*")):
            try:
                yield from play(*old_run(wanted, folder), [self], self._asked, self.host)
                return
            except InUse:
                raise
            except ConfigError:  # the checkpoint is damaged, or of another configuration
                if lineage_of(folder) is not None:
                    raise  # a fork cannot begin again by itself
                self.rows.clear()
        clear(folder)
        yield from play(*new_run(wanted, folder, self.request.run_id), [self], self._asked, self.host)

    @contextmanager
    def _alone(self, folder: Path) -> Iterator[None]:
        """Hold the run's lock; wait for it if the process of a killed driver still works on this run."""
        make_folders(folder.parent)
        lock = Lock(folder.parent / f".{folder.name}.lock")
        if not lock.wait(ORPHAN_SECONDS, partial(check, self._asked)):
            raise in_use_error(folder, lock)
        try:
            yield
        finally:
            lock.release()

    def _asked(self) -> int:
        return self.asked

    def _report(self, status: str, reason: str = "") -> None:
        rows, self.rows = self.rows, []
        self.last = time.monotonic()
        self.send(RunReport(rows, status, reason))

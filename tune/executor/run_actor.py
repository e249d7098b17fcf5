"""The actor that executes runs, one after the other, each in a folder of its own. Ray Tune starts it.

An earlier process may have begun the run that is asked for. If it has finished the run, the records are read from the
folder. If it has left a checkpoint, the run is resumed; else it begins again.
"""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ray import tune

from ...engine.api import resume, run
from ...engine.config.run_spec import RunSpec
from ...engine.config.schema import experiment
from ...engine.errors import ConfigError, Diverged, Interrupted, InUse
from ...engine.records.lineage import lineage_of
from ...engine.rounds.driver import Record
from ...engine.runs.observer import Observer
from ...engine.runs.run_directory import clear, read_rows
from ...engine.storage.lock import Lock, in_use_error, make_folders
from .source import Report, RunRequest

HEARTBEAT_SECONDS = 0.5
"""The longest time until the actor answers the driver, and the time between reports of a run without columns."""

ORPHAN_SECONDS = 60.0
"""How long to wait for the process of a driver that was killed. Ray ends such a process within a few seconds."""

GRACE_SECONDS = 30.0
"""The time in which a run must write a checkpoint and end when it is asked to."""


class RunActor(tune.Trainable):
    """A trainable of Ray Tune, whose `step` returns the next report, and for Tune's own results the last record in it.
    The run has a thread of its own, so that it can be asked to end in the middle of a round."""

    def setup(self, config: dict[str, Any]) -> None:
        self.config, self.running = config, None

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Prepare for another run in the same process, which saves the time of importing torch."""
        self.cleanup()
        self.setup(new_config)
        return True

    def step(self) -> dict[str, Any]:
        if self.running is None:  # not earlier: Tune may start an actor and then choose another one for the run
            self.running = RunThread(self.config["run"], self.config["cwd"], self.config["variables"])
        report = self.running.next()
        return {"report": report, "status": report.status, **(report.rows[-1] if report.rows else {})}

    def cleanup(self) -> None:
        if self.running is not None:
            self.running.stop()


class RunThread(Observer):
    """A run in a thread of its own.

    After each report the run waits until the next one is asked for, so that a run that its report ends does not
    continue in the meantime.
    """

    def __init__(self, spec: RunRequest, cwd: str, variables: dict[str, str]) -> None:
        self.spec, self.cwd, self.variables = spec, cwd, variables
        self.reports: queue.Queue[Report] = queue.Queue()
        self.heard = threading.Semaphore(0)
        self.unheard = False  # whether the run waits for the answer to its last report
        self.asked = 0  # the signal by which the run is asked to end, 0 for none
        self.rows: list[Record] = []
        self.rounds = 0
        self.last = time.monotonic()
        self.thread = threading.Thread(target=self._run, name="run", daemon=True)
        self.thread.start()

    # --- the driver's side --------------------------------------------------------------------------------------------
    def next(self) -> Report:
        """The next report, or an empty one after HEARTBEAT_SECONDS without a report."""
        if self.unheard:
            self.unheard = False
            self.heard.release()
        try:
            report = self.reports.get(timeout=HEARTBEAT_SECONDS)
        except queue.Empty:
            return Report([], "running", "")
        self.unheard = report.status == "running"
        return report

    def stop(self) -> None:
        """Ask the run to write a checkpoint and end; wait for it."""
        self.asked = signal.SIGTERM
        self.heard.release()
        self.thread.join(GRACE_SECONDS)
        if self.thread.is_alive():
            os._exit(1)  # else the next run of this process would run beside it

    # --- an observer --------------------------------------------------------------------------------------------------
    def begin(self, run_spec: RunSpec, facts: dict[str, Any]) -> None:
        self.rounds = run_spec.last_round

    def resumed(self, records: list[Record]) -> None:
        self.rows[:] = records

    def record(self, record: Record) -> None:
        self.rows.append(record)
        columns = self.spec.columns
        if columns is None:
            due = time.monotonic() - self.last > HEARTBEAT_SECONDS
        else:
            due = all(column in record for column in columns)
        if due and record["round"] < self.rounds:
            self._report("running")
            if not self.asked:
                self.heard.acquire()

    # --- the thread ---------------------------------------------------------------------------------------------------
    def _run(self) -> None:
        folder = Path(self.spec.folder)
        try:
            os.environ.update(self.variables)
            os.chdir(self.cwd)
            with self._alone(folder):
                self._run_or_read(folder)
                if not self.spec.keep_model:
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

    def _run_or_read(self, folder: Path) -> None:
        """Begin the run, resume it, or read the records if it has finished."""
        if (folder / "result.json").is_file():
            self.rows = read_rows(folder / "rounds.parquet")
            return
        wanted = experiment(self.spec.experiment)
        if (folder / "run.json").is_file() and any((folder / "checkpoints").glob("round-*")):
            try:
                resume(wanted, folder, [self], self._asked)
                return
            except InUse:
                raise
            except ConfigError:  # the checkpoint is damaged, or of another configuration
                if lineage_of(folder) is not None:
                    raise  # a fork cannot begin again by itself
                self.rows.clear()
        clear(folder)
        run(wanted, folder, [self], self.spec.run_id, self._asked)

    @contextmanager
    def _alone(self, folder: Path) -> Iterator[None]:
        """Hold the run's lock; wait for it if the process of a killed driver still works on this run."""
        make_folders(folder.parent)
        lock = Lock(folder.parent / f".{folder.name}.lock")
        if not lock.wait(ORPHAN_SECONDS, self._check):
            raise in_use_error(folder, lock)
        try:
            yield
        finally:
            lock.release()

    def _check(self) -> None:
        if self.asked:
            raise Interrupted(self.asked)

    def _asked(self) -> int:
        return self.asked

    def _report(self, status: str, reason: str = "") -> None:
        rows, self.rows = self.rows, []
        self.last = time.monotonic()
        self.reports.put(Report(rows, status, reason))

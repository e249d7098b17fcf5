"""The actor that executes runs, one after the other. Ray Tune starts it."""

from __future__ import annotations

import os
import queue
import signal
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any

from ray import tune

from ...engine.stopping import on_signal
from .requested_run import RequestedRun
from .source import HEARTBEAT_SECONDS, RunReport, RunRequest

GRACE_SECONDS = 30.0
"""The time in which a run must write a checkpoint and end when it is asked to."""


class RunActor(tune.Trainable):
    """A trainable of Ray Tune, whose `step` returns the next report. The run has a thread of its own, so that it can be
    asked to end in the middle of a round."""

    def setup(self, config: dict[str, Any]) -> None:
        on_signal()  # the process that has started Tune says when to stop
        self.config, self.running = config, None

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Prepare for another run in the same process, which saves the time of importing torch."""
        self.cleanup()
        self.setup(new_config)
        return True

    def step(self) -> dict[str, Any]:
        if self.running is None:  # not earlier: Tune may start an actor and then choose another one for the run
            self.running = RunThread(self.config["run"], self.config["cwd"], self.config["variables"])
        return {"report": self.running.next()}

    def cleanup(self) -> None:
        if self.running is not None:
            self.running.stop()


class RunThread(RequestedRun):
    """A run in a thread of its own.

    After each report the run waits until the next one is asked for, so that a run that its report ends does not
    continue in the meantime.
    """

    def __init__(self, spec: RunRequest, cwd: str, variables: dict[str, str]) -> None:
        super().__init__(spec)
        self.cwd, self.variables = cwd, variables
        self.reports: queue.Queue[RunReport] = queue.Queue()
        self.heard = threading.Semaphore(0)
        self.unheard = False  # whether the run waits for the answer to its last report
        self.thread = threading.Thread(target=self._run, name="run", daemon=True)
        self.thread.start()

    # --- the driver's side --------------------------------------------------------------------------------------------
    def next(self) -> RunReport:
        """The next report, or an empty one after HEARTBEAT_SECONDS without a report."""
        if self.unheard:
            self.unheard = False
            self.heard.release()
        try:
            report = self.reports.get(timeout=HEARTBEAT_SECONDS)
        except queue.Empty:
            return RunReport([], "running", "")
        self.unheard = report.status == "running"
        return report

    def stop(self) -> None:
        """Ask the run to write a checkpoint and end; wait for it."""
        self.asked = signal.SIGTERM
        self.heard.release()
        self.thread.join(GRACE_SECONDS)
        if self.thread.is_alive():
            os._exit(1)  # else the next run of this process would run beside it

    # --- the thread ---------------------------------------------------------------------------------------------------
    def send(self, report: RunReport) -> None:
        self.reports.put(report)
        if report.status == "running" and not self.asked:
            self.heard.acquire()

    def _run(self) -> None:
        for _ in self.execute():
            pass

    def _run_or_read(self, folder: Path) -> Generator[Any, Any, None]:
        os.environ.update(self.variables)
        os.chdir(self.cwd)
        return super()._run_or_read(folder)

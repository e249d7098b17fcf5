"""Runs as trials of Ray Tune. Tune starts the processes, reserves their resources and passes on their reports."""

from __future__ import annotations

import logging
import math
import os
import queue
import signal
import tempfile
import threading
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import ray
from ray import tune
from ray.tune.schedulers import FIFOScheduler, TrialScheduler
from ray.tune.search import Searcher

from ...engine.backends.ray.connect import connect
from ...engine.backends.ray.local_ray import disconnect
from ...engine.config.schema import Engine
from ...engine.errors import ConfigError
from ...engine.stopping import on_signal
from .requested_run import RequestedRun
from .source import HEARTBEAT_SECONDS, Executor, RunReport, RunRequest, Source

GRACE_SECONDS = 30.0
"""The time in which a run must write a checkpoint and end when it is asked to."""

SETTINGS = {
    "RAY_AIR_NEW_OUTPUT": "0",  # its table cannot be switched off, and we print a line of our own
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # Tune writes no files for each run
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # our handler lets runs write a checkpoint
    "TUNE_GLOBAL_CHECKPOINT_S": "1000000",  # we resume from the runs' folders and Optuna's storage
    "TUNE_WARN_THRESHOLD_S": "60",
    "TUNE_FORCE_TRIAL_CLEANUP_S": str(int(GRACE_SECONDS)),
}
"""Environment variables for Tune, unless they are set already."""


class NotPickled:
    """Tune pickles searchers and schedulers to restore them later. We never restore them, so nothing is pickled."""

    def __getstate__(self) -> dict[str, Any]:
        return {}


class SourceSearcher(NotPickled, Searcher):
    """A searcher of Tune that hands out the source's runs, at most `limit` at once. `live`: Tune's id -> run's key."""

    def __init__(self, source: Source[Any], limit: int) -> None:
        super().__init__()
        self.source, self.limit = source, limit
        self.live: dict[str, str] = {}

    def suggest(self, trial_id: str) -> Any:
        if len(self.live) >= self.limit:
            return None
        request = self.source.next()
        if request is None:
            return None if self.live else Searcher.FINISHED
        self.live[trial_id] = request.key
        variables = {name: value for name, value in os.environ.items() if name.startswith("FEDFLEET_")}
        return {"run": request, "cwd": str(Path.cwd()), "variables": variables}

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        key = self.live.pop(trial_id, None)
        if error and key is not None:
            self.source.on_process_death(key)

    def save(self, checkpoint_path: str) -> None:
        """There is nothing to save."""

    def restore(self, checkpoint_path: str) -> None:
        """Nothing was saved."""


class SourceScheduler(NotPickled, FIFOScheduler):
    """A scheduler of Tune: runs start in the order of their requests, and end when the source says so."""

    def __init__(self, source: Source[Any]) -> None:
        super().__init__()
        self.source = source
        self.on_signal = signal.getsignal(signal.SIGUSR1)

    def on_trial_add(self, tune_controller: Any, trial: Any) -> None:
        # Tune kills a process ten seconds after asking it to end; a checkpoint may take longer.
        tune_controller._actor_force_cleanup_timeout = GRACE_SECONDS + 5
        # Tune has replaced the handler of SIGUSR1 by one that drops the runs.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGUSR1, self.on_signal)

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        report = result["report"]
        if report.status == "running" and not report.rows:
            return TrialScheduler.CONTINUE
        over = self.source.on_report(trial.config["run"].key, report) or report.status != "running"
        return TrialScheduler.STOP if over else TrialScheduler.CONTINUE


class StopWhenAsked(NotPickled, tune.Stopper):
    """Ends all runs when `asked` returns something true."""

    def __init__(self, asked: Callable[[], Any]) -> None:
        self.asked = asked

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        return False

    def stop_all(self) -> bool:
        return bool(self.asked())


class RayTune(Executor):
    """Executes runs as trials of Ray Tune; see `executor.on_ray`."""

    def __init__(self, engine: Engine, at_once: int | None, workers: int, share: bool) -> None:
        self.engine = engine.model_copy(update={"backend": "ray", "workers": max(1, workers)})
        self.at_once, self.workers, self.share = at_once, workers, share
        self.ours = self.started = False

    def start(self, stop: Callable[[], Any]) -> None:
        """Connect to Ray or start it."""
        if (self.engine.address or "").startswith("ray://"):
            raise ConfigError(
                f"engine.address={self.engine.address}: searches and studies cannot run through Ray's client; start "
                "the command on a node of the cluster, with auto or HOST:PORT as the address"
            )
        if not self.started:
            self.ours, self.started = connect(self.engine, lambda: signal_of(stop)), True

    def run(self, source: Source[Any], stop: Callable[[], Any]) -> None:
        self.start(stop)
        bundles = self._bundles()
        limit = self.at_once or fitting(bundles)
        for name, value in SETTINGS.items():
            os.environ.setdefault(name, value)
        logging.getLogger("ray.tune").setLevel(logging.CRITICAL)  # the source says that a process died
        with tempfile.TemporaryDirectory(prefix="ff-tune-") as scratch:
            tuner = tune.Tuner(
                tune.with_resources(RunActor, tune.PlacementGroupFactory(bundles, strategy="STRICT_PACK")),
                tune_config=tune.TuneConfig(
                    search_alg=SourceSearcher(source, limit),
                    scheduler=SourceScheduler(source),
                    num_samples=-1,
                    reuse_actors=True,  # a new process would spend seconds on importing torch
                    trial_name_creator=lambda trial: trial.config["run"].key,
                    trial_dirname_creator=lambda trial: trial.config["run"].key,
                ),
                run_config=tune.RunConfig(
                    name="runs",
                    storage_path=scratch,
                    stop=StopWhenAsked(stop),
                    verbose=0,
                    checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),  # a run writes its own checkpoint
                    failure_config=tune.FailureConfig(
                        max_failures=1
                    ),  # for a process that died; other failures are reports
                ),
            )
            tuner.fit()

    def close(self) -> None:
        if self.ours:
            disconnect()

    def _bundles(self) -> list[dict[str, float]]:
        """The resources that a run reserves from its beginning to its end.

        A run with worker processes has one bundle for each of them, beside an empty one for the run itself, in one
        placement group on one node. It starts only if all fit, so two runs cannot wait for each other's workers.
        """
        one = {"CPU": self.engine.cpus, "GPU": self.engine.gpus}
        one = shared(one, self.at_once) if self.share and self.at_once else one
        one = {name: amount for name, amount in one.items() if amount}
        return [{}, *[one] * self.workers] if self.workers else [one]


def signal_of(stop: Callable[[], Any]) -> int:
    """The number of a signal that asks to end, or 0."""
    found = stop()
    return found if isinstance(found, int) else 0


def shared(one: dict[str, float], at_once: int) -> dict[str, float]:
    """At most an equal part of the cluster, for so many runs at once."""
    have = ray.cluster_resources()
    parts = {name: math.floor(1e4 * have.get(name, 0.0) / at_once) / 1e4 for name in one}  # the resolution of Ray
    return {name: min(amount, parts[name]) if parts[name] else amount for name, amount in one.items()}


def fitting(bundles: list[dict[str, float]]) -> int:
    """The number of runs that fit into the cluster, at least 1. bundles: resources of a run."""
    have = ray.cluster_resources()
    need = {name: sum(bundle.get(name, 0.0) for bundle in bundles) for name in ("CPU", "GPU")}
    return max(1, min(int(have.get(name, 0.0) / amount + 1e-9) for name, amount in need.items() if amount))


# --- the process of a run ---------------------------------------------------------------------------------------------
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

    def __init__(self, request: RunRequest, cwd: str, variables: dict[str, str]) -> None:
        super().__init__(request)
        self.cwd, self.variables = cwd, variables
        self.reports: queue.Queue[RunReport] = queue.Queue()
        self.heard = threading.Semaphore(0)
        self.unheard = False  # whether the run waits for the answer to its last report
        self.thread = threading.Thread(target=self.execute, name="run", daemon=True)
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

    def _run_or_read(self, folder: Path) -> Generator[Any, Any, None]:
        os.environ.update(self.variables)
        os.chdir(self.cwd)
        return super()._run_or_read(folder)

"""Runs as trials of Ray Tune. Tune starts the processes, reserves their resources and passes on their reports."""

from __future__ import annotations

import logging
import os
import signal
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ray import tune
from ray.tune.schedulers import FIFOScheduler, TrialScheduler
from ray.tune.search import Searcher

from .run_actor import GRACE_SECONDS, RunActor
from .source import Source

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

    def __init__(self, source: Source, limit: int) -> None:
        super().__init__()
        self.source, self.limit = source, limit
        self.live: dict[str, str] = {}

    def suggest(self, trial_id: str) -> Any:
        if len(self.live) >= self.limit:
            return None
        spec = self.source.next()
        if spec is None:
            return None if self.live else Searcher.FINISHED
        self.live[trial_id] = spec.key
        variables = {name: value for name, value in os.environ.items() if name.startswith("FEDFLEET_")}
        return {"run": spec, "cwd": str(Path.cwd()), "variables": variables}

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

    def __init__(self, source: Source) -> None:
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


def execute(source: Source, limit: int, bundles: list[dict[str, float]], stop: Callable[[], Any]) -> None:
    """Execute a source's runs until it has none left or `stop` returns something true.

    limit: largest number of simultaneous runs. bundles: resources that each run reserves. Ray must be connected.
    Returns when all runs that were under way have ended.
    """
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)  # the source reports a process that died, in one sentence
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

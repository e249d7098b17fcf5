"""Runs as trials of Ray Tune. Tune starts the processes, reserves their resources and passes on their reports."""

from __future__ import annotations

import logging
import math
import os
import signal
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
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


def execute(
    source: Source,
    one: dict[str, float],
    workers: int,
    at_once: int | None,
    share: bool,
    stop: Callable[[], Any],
) -> None:
    """Execute a source's runs until it has none left or `stop` returns something true. Returns when all runs that were
    under way have ended. Ray must be connected.

    one: what a run's process, or each of its worker processes, reserves. at_once, workers, share: as in `Executor`.
    """
    bundles = bundles_of_run(shared(one, at_once) if share and at_once else one, workers)
    limit = at_once or fitting(bundles)
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


def shared(one: dict[str, float], at_once: int) -> dict[str, float]:
    """At most an equal part of the cluster, for so many runs at once."""
    have = ray.cluster_resources()
    parts = {name: math.floor(1e4 * have.get(name, 0.0) / at_once) / 1e4 for name in one}  # the resolution of Ray
    return {name: min(amount, parts[name]) if parts[name] else amount for name, amount in one.items()}


def bundles_of_run(one: dict[str, float], workers: int) -> list[dict[str, float]]:
    """The resources that a run reserves from its beginning to its end.

    A run with worker processes has one bundle for each of them, beside an empty one for the run itself, in one
    placement group on one node. It starts only if all fit, so two runs cannot wait for each other's workers.
    """
    one = {name: amount for name, amount in one.items() if amount}
    return [{}, *[one] * workers] if workers else [one]


def fitting(bundles: list[dict[str, float]]) -> int:
    """The number of runs that fit into the cluster, at least 1. bundles: resources of a run."""
    have = ray.cluster_resources()
    need = {name: sum(bundle.get(name, 0.0) for bundle in bundles) for name in ("CPU", "GPU")}
    return max(1, min(int(have.get(name, 0.0) / amount + 1e-9) for name, amount in need.items() if amount))

"""Runs as trials of Ray Tune, which starts processes, gives them what they hold, and passes on what they report."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ray import tune
from ray.tune.schedulers import FIFOScheduler, TrialScheduler
from ray.tune.search import Searcher

from .run_actor import GRACE_SECONDS, RunActor
from .source import Source

SETTINGS = {
    "RAY_AIR_NEW_OUTPUT": "0",  # which shows a table whatever it is told; we have a line of our own
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # no files of Tune's own for each run
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # ours asks politely, and keeps what has ended
    "TUNE_GLOBAL_CHECKPOINT_S": "1000000",  # the folders and Optuna's storage are what is resumed from
    "TUNE_WARN_THRESHOLD_S": "60",
    "TUNE_FORCE_TRIAL_CLEANUP_S": str(int(GRACE_SECONDS)),
}
"""Of Tune, unless the environment says otherwise."""


class Unkept:
    """Tune pickles what it is given, to be restored from; here nothing ever is."""

    def __getstate__(self) -> dict[str, Any]:
        return {}


class Proposer(Unkept, Searcher):
    """Tune's searcher: hands out the source's runs, at most `limit` at once. `live`: Tune's id -> key of the run."""

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
        ours = {name: value for name, value in os.environ.items() if name.startswith("FEDFLEET_")}
        return {"run": spec, "cwd": str(Path.cwd()), "variables": ours}

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        key = self.live.pop(trial_id, None)
        if error and key is not None:
            self.source.died(key)

    def save(self, checkpoint_path: str) -> None:
        """There is nothing to keep."""

    def restore(self, checkpoint_path: str) -> None:
        """Nothing was kept."""


class Judge(Unkept, FIFOScheduler):
    """Tune's scheduler: first come first served, ended where the source says so."""

    def __init__(self, source: Source) -> None:
        super().__init__()
        self.source = source

    def on_trial_add(self, tune_controller: Any, trial: Any) -> None:
        # Tune kills a process that has not ended ten seconds after it was asked to; a checkpoint may take longer.
        tune_controller._actor_force_cleanup_timeout = GRACE_SECONDS + 5

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        report = result["report"]
        if report.status == "running" and not report.rows:
            return TrialScheduler.CONTINUE
        over = self.source.hear(trial.config["run"].key, report) or report.status != "running"
        return TrialScheduler.STOP if over else TrialScheduler.CONTINUE


class Stop(Unkept, tune.Stopper):
    """Ends all runs where the user or the source asks for it."""

    def __init__(self, asked: Callable[[], Any]) -> None:
        self.asked = asked

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        return False

    def stop_all(self) -> bool:
        return bool(self.asked())


def execute(source: Source, limit: int, bundles: list[dict[str, float]], stop: Callable[[], Any]) -> None:
    """Execute a source's runs, at most `limit` at once, each holding `bundles`, until there are none or `stop` says so.

    Ray is connected. Returns when all runs that were under way have ended.
    """
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)  # a process that died is told by the source, in a sentence
    with tempfile.TemporaryDirectory(prefix="ff-tune-") as scratch:
        tuner = tune.Tuner(
            tune.with_resources(RunActor, tune.PlacementGroupFactory(bundles, strategy="STRICT_PACK")),
            tune_config=tune.TuneConfig(
                search_alg=Proposer(source, limit),
                scheduler=Judge(source),
                num_samples=-1,
                reuse_actors=True,  # importing torch takes seconds
                trial_name_creator=lambda trial: trial.config["run"].key,
                trial_dirname_creator=lambda trial: trial.config["run"].key,
            ),
            run_config=tune.RunConfig(
                name="runs",
                storage_path=scratch,
                stop=Stop(stop),
                verbose=0,
                checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),  # the run's folder has its own
                failure_config=tune.FailureConfig(max_failures=1),  # of its process; all else is reported
            ),
        )
        tuner.fit()

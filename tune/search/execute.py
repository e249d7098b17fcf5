"""Trials on Ray Tune, which starts processes, gives them what they hold, and passes on what they report."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable
from typing import Any

from ray import tune
from ray.tune.schedulers import FIFOScheduler, TrialScheduler
from ray.tune.search import Searcher

from ...engine.backends.ray.connect import start_ray
from ...engine.config.run_spec import RunSpec
from ...engine.config.schema import Experiment
from ...engine.errors import ConfigError
from .conductor import Conductor
from .trial import play

QUIET = {
    "RAY_AIR_NEW_OUTPUT": "0",  # which shows a table whatever it is told; the search has a line of its own
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # no files of Tune's own for each trial
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # ours asks politely, and keeps what has ended
    "TUNE_GLOBAL_CHECKPOINT_S": "1000000",  # Optuna's storage is what a search is resumed from
    "TUNE_WARN_THRESHOLD_S": "60",
}


class Unkept:
    """Tune pickles what it is given, to be restored from; here nothing ever is."""

    def __getstate__(self) -> dict[str, Any]:
        return {}


class Proposer(Unkept, Searcher):
    """Tune's searcher: a trial at a time, at most `limit` at once."""

    def __init__(self, conductor: Conductor, limit: int) -> None:
        super().__init__()
        self.conductor, self.limit = conductor, limit
        self.numbers: dict[str, int] = {}  # Tune's id -> Optuna's number

    def suggest(self, trial_id: str) -> Any:
        if len(self.conductor.live) >= self.limit:
            return None
        config = self.conductor.propose()
        if config is None:
            return None if self.conductor.live else Searcher.FINISHED
        self.numbers[trial_id] = config["number"]
        return config

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        if error:
            self.conductor.died(self.numbers[trial_id])

    def save(self, checkpoint_path: str) -> None:
        """Nothing to keep: Optuna's storage has it."""

    def restore(self, checkpoint_path: str) -> None:
        """Nothing was kept."""


class Judge(Unkept, FIFOScheduler):
    """Tune's scheduler: first come first served, ended where the conductor says so."""

    def __init__(self, conductor: Conductor) -> None:
        super().__init__()
        self.conductor = conductor

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        over = self.conductor.hear(trial.config["number"], result)
        return TrialScheduler.STOP if over else TrialScheduler.CONTINUE


class Stop(Unkept, tune.Stopper):
    """Ends all trials where the search was asked to stop, or cannot succeed."""

    def __init__(self, asked: Callable[[], bool]) -> None:
        self.asked = asked

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        return False

    def stop_all(self) -> bool:
        return self.asked()


def execute(conductor: Conductor, stop: Callable[[], int]) -> None:
    """Run trials until there is none left or `stop` has the number of a signal."""
    plan = conductor.plan
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    sample = plan.experiment({r.key: r.values[0] for r in plan.ranges})
    bundles = held(sample, plan.settings.workers)
    ours = begin_ray(sample, plan.settings.workers)
    try:
        logging.getLogger("ray.tune").setLevel(logging.ERROR)
        limit = at_once(bundles) if plan.settings.concurrent == "auto" else plan.settings.concurrent
        with tempfile.TemporaryDirectory(prefix="ff-tune-") as scratch:
            tuner(conductor, limit, bundles, scratch, lambda: bool(stop() or conductor.broken)).fit()
    finally:
        if ours:
            import ray

            ray.shutdown()


def tuner(
    conductor: Conductor, limit: int, bundles: list[dict[str, float]], scratch: str, stop: Callable[[], bool]
) -> tune.Tuner:
    return tune.Tuner(
        tune.with_resources(play, tune.PlacementGroupFactory(bundles, strategy="STRICT_PACK")),
        tune_config=tune.TuneConfig(
            search_alg=Proposer(conductor, limit),
            scheduler=Judge(conductor),
            num_samples=-1,
            reuse_actors=True,  # importing torch takes seconds
            trial_name_creator=lambda trial: f"{trial.config['number']:04d}",
            trial_dirname_creator=lambda trial: f"{trial.config['number']:04d}",
        ),
        run_config=tune.RunConfig(
            name="search",
            storage_path=scratch,
            stop=Stop(stop),
            verbose=0,
            failure_config=tune.FailureConfig(max_failures=1),  # of its process; all else is reported
        ),
    )


def held(sample: Experiment, workers: int) -> list[dict[str, float]]:
    """What a trial holds from its beginning to its end. Workers are bundles of its own placement group beside an empty
    one for the trial itself, all on one node: it starts only where all fit, so trials cannot wait for each other's
    workers."""
    one = {"CPU": sample.engine.cpus, **({"GPU": sample.engine.gpus} if sample.engine.gpus else {})}
    return [{}, *[one] * workers] if workers else [one]


def begin_ray(sample: Experiment, workers: int) -> bool:
    """Connect to Ray or start it; whether it is ours to stop. ConfigError for a trial that could never be placed."""
    engine = sample.engine.model_copy(update={"backend": "ray", "workers": max(1, workers)})
    try:
        return start_ray(RunSpec("search", sample.model_copy(update={"engine": engine})))
    except ConfigError as error:
        raise ConfigError(f"search.workers: a trial does not fit: {error}") from None


def at_once(bundles: list[dict[str, float]]) -> int:
    """How many trials fit into the cluster."""
    import ray

    have = ray.cluster_resources()
    need = {name: sum(bundle.get(name, 0.0) for bundle in bundles) for name in ("CPU", "GPU")}
    return max(1, min(int(have.get(name, 0.0) / amount + 1e-9) for name, amount in need.items() if amount))

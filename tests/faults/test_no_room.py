"""A run in a Ray that others use: in a trial of the user's own search, and beside a busy actor."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ..engine.test_shared_ray import started

TRIALS = """
import tempfile

from ray import tune


def trial(config):
    blocker = Busy.options(scheduling_strategy=here()).remote() if config["busy"] else None
    if blocker is not None:
        ray.get(blocker.here.remote())
    tune.report(told(config["wait"]))


def told(wait):
    try:
        return {"sha": fedfleet.run(experiment(workers=1, cpus=1, wait=wait)).model_sha256}
    except fedfleet.FedFleetError as error:
        return {"why": f"{type(error).__name__}: {error}"}


@ray.remote(num_cpus=1)
class Busy:
    def here(self):
        pass


def here():
    from ray.util.placement_group import get_current_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    return PlacementGroupSchedulingStrategy(get_current_placement_group())


def tried(bundles, busy=False, wait=1e4):
    tuner = tune.Tuner(
        tune.with_resources(trial, tune.PlacementGroupFactory(bundles)),
        param_space={"busy": busy, "wait": wait},
        run_config=tune.RunConfig(storage_path=tempfile.mkdtemp(dir=os.getcwd()), verbose=0),
    )
    (found,) = tuner.fit()
    return {name: found.metrics[name] for name in ("sha", "why") if name in found.metrics}


one = {"CPU": 1}
local = fedfleet.run(experiment(backend="local", cpus=1)).model_sha256
ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
steps = {"local": local, "no bundle": tried([one]), "a bundle": tried([one, one])}
steps["a busy bundle"] = tried([one, one], busy=True, wait=0.5)
actors = [Busy.remote() for _ in range(2)]
ray.get([each.here.remote() for each in actors])
steps["busy"] = told(0.5)
ray.kill(actors[0])
steps["free"] = told(1e4)
print(json.dumps(steps))
"""


@pytest.mark.long
def test_a_run_says_that_others_hold_what_its_workers_need(tmp_path: Path) -> None:
    """In a trial without a bundle for the worker at once, though `engine.wait` is hours; else within `engine.wait`."""
    process = started(TRIALS, tmp_path)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    steps = json.loads(next(line for line in out.splitlines() if line.startswith(("{", "["))))
    trials = "choose engine.backend=local, or give the trial one more bundle"
    assert steps["no bundle"]["why"] == (
        "ConfigError: engine.workers: the placement group of this trial has room for 0 of 1 workers beside the trial "
        f"itself; {trials} {{'CPU': 1}} for each worker (tune.with_resources, tune.PlacementGroupFactory)"
    )
    assert steps["a busy bundle"]["why"].startswith("NoRoom: engine.workers: the workers take 1 CPU, of which the ")
    assert f"has 0 free after 0.5 s (engine.wait); {trials} for each worker" in steps["a busy bundle"]["why"]
    assert steps["busy"]["why"] == (
        "NoRoom: engine.workers: no room for 1 workers within 0.5 s (engine.wait); they take 1 CPU, free 0; lower "
        "engine.workers, choose engine.backend=local, or wait for what others hold"
    )
    assert steps["a bundle"]["sha"] == steps["free"]["sha"] == steps["local"]

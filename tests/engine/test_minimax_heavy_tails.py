"""Min-max problems with gradient noise of infinite variance (tail index 1.3) on both groups: normalised steps converge
without tuning.

The problem is a PL saddle of eight clients, and every entry of every gradient has Pareto noise. Fed-NSGDA-M and
FedMuon-DA have their default beta and the same step length for both groups, which depends on the number R of rounds
like R^(-3/4), as in Zhang and Gao 2025; there are no thresholds. LocalSGDAM gets the best of three step sizes with a
ratio of 3.2.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from fedfleet.engine import run
from fedfleet.engine.config.schema import experiment

SEEDS = range(5)
SADDLE = {"name": "saddle", "condition": 4.0, "copies": 2}
NOISE = {"name": "noisy", "of": SADDLE, "law": "pareto", "tail": 1.3, "scale": 0.3}
SHORT, LONG = 50, 200


def distance(method: dict[str, Any], rounds: int, seed: int) -> float:
    """The distance from the saddle at the end, divided by the distance at the start."""
    given = {
        "seed": seed,
        "workload": NOISE,
        "method": method,
        "federation": {"clients": 8, "cohort": 8, "rounds": rounds, "local": {"steps": 4, "batch": 1}},
        "engine": {"backend": "local", "dtype": "float64"},
        "evaluate": {"every": 0},
        "tracking": {"uri": "none"},
    }
    return run(experiment(given)).metrics["eval/distance"] / start(seed)


@functools.cache
def start(seed: int) -> float:
    from fedfleet.workloads.problems.saddle import Saddle

    return float(np.linalg.norm(Saddle(condition=4.0).system(seed, 8).solution))


def length(rounds: int) -> float:
    return 0.1 * (SHORT / rounds) ** 0.75


@functools.cache
def distances(name: str, rounds: int, lr: float) -> np.ndarray:
    """The distances for all seeds."""
    return np.array([distance({"name": name, "lr": lr}, rounds, seed) for seed in SEEDS])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fed_nsgda_m", "fedmuon_da"])
def test_normalised_methods_converge(name):
    """At most a quarter of the distance to the saddle is left for every seed, and less after four times the rounds."""
    short, long = distances(name, SHORT, length(SHORT)), distances(name, LONG, length(LONG))
    assert long.max() < 0.25, long
    assert np.median(long) < 0.8 * np.median(short), (short, long)


@pytest.mark.slow
def test_local_sgdam_does_not():
    """With each of three step sizes, the median distance is twice that of Fed-NSGDA-M. With the two larger ones, one
    seed of five ends about as far from the saddle as it began, or farther."""
    there = np.median(distances("fed_nsgda_m", LONG, length(LONG)))
    tuned = [distances("local_sgdam", LONG, lr) for lr in (0.1, 0.0316, 0.01)]
    assert min(np.median(found) for found in tuned) > 2 * there, (there, tuned)
    assert min(found.max() for found in tuned[:2]) > 0.8, tuned

"""Where a run is computed by `engine.backend: auto`: the rule, and what the run's folder says."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from torch import nn

from fedfleet.engine import run
from fedfleet.engine.run_spec import RunSpec
from fedfleet.engine.workload.model import multiplications
from fedfleet.tune.files import load
from fedfleet.workloads.data.digits import Digits
from fedfleet.workloads.models.small import Mlp
from fedfleet.workloads.problems.auc import Auc
from fedfleet.workloads.workload import Model

from .setups import Built

WORK = 50 * 20 * 5 * 200_000
"""The multiplications of the shipped experiment: a step with a batch of 32 has 32 x (64 x 64 + 64 x 10), fewer than
what a step counts at least."""


@pytest.fixture(autouse=True)
def two_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedfleet.engine.config.schema.processors", lambda: 2.0)


def place(*changes: str) -> str:
    return RunSpec.of("place", load("digits", changes)).backend.name


def test_the_work_of_a_run_is_counted():
    spec = RunSpec.of("place", load("digits"))
    assert spec.multiplications() == WORK
    assert spec.backend.why.startswith("1 billion multiplications; ")
    batch = RunSpec.of("place", load("digits", ["federation.local.batch=64"]))
    assert batch.multiplications() == 50 * 20 * 5 * 64 * (64 * 64 + 64 * 10)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ((), "local"),
        (("federation.rounds=200",), "local"),  # 4 billion
        (("federation.rounds=201",), "ray"),
        (("engine.workers=1",), "ray"),
        (("engine.workers=[{count: 1}]",), "ray"),
        (("engine.address=10.0.0.1:6379",), "ray"),
        (("engine.gpus=0.5",), "ray"),
        (("engine.device=cuda", "federation.rounds=201"), "local"),  # one process uses one GPU
        (("engine.device=cuda", "engine.workers=2"), "ray"),
        (("federation.local={epochs: 20}",), "local"),  # as many steps: 15 rows make one batch
        (("federation.local={epochs: 21}",), "ray"),
        (("federation.local={epochs: 21}", "engine.backend=local"), "local"),
        (("engine.backend=ray",), "ray"),
        (("workload={name: quadratic}", "method={name: fedavg}"), "local"),
    ],
)
def test_where_it_is_computed(changes: tuple[str, ...], name: str):
    assert place(*changes) == name


def test_one_processor(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fedfleet.engine.config.schema.processors", lambda: 1.0)
    assert place("federation.rounds=100000") == "local"


def of(network: Model) -> float:
    return multiplications(Digits(network))


def broken(module: nn.Module) -> nn.Module:
    module.forward = lambda x: x.nothing
    return module


def test_multiplications_of_networks():
    assert of(Mlp((5,))) == 64 * 5 + 5 * 10
    convolution = nn.Sequential(nn.Conv2d(1, 6, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 9, 10))
    assert of(Built(lambda: convolution)) == (3 * 3) * (3 * 3 * 6) + 54 * 10
    assert multiplications(Auc(Digits(Mlp((5,))))) == 64 * 5 + 5 * 10
    grouped = nn.Sequential(nn.Flatten(-2), nn.Conv1d(1, 1, 64), nn.Flatten(), nn.Linear(1, 10))
    assert of(Built(lambda: grouped)) == 64 + 10


@pytest.mark.parametrize(
    "network",
    [
        nn.Sequential(nn.Flatten(2), nn.RNN(64, 10)),
        nn.Sequential(nn.Flatten(), nn.Bilinear(64, 64, 10)),
        broken(nn.Sequential(nn.Flatten(), nn.Linear(64, 10))),
    ],
    ids=["recurrent", "bilinear", "broken"],
)
def test_what_cannot_be_counted(network: nn.Module):
    assert of(Built(lambda: network)) == math.inf


def test_the_folder_says_where_and_why(tmp_path: Any):
    short = load("digits", ["federation.rounds=1", "tracking.uri=none"])
    run(short, tmp_path / "run")
    assert json.loads((tmp_path / "run" / "run.json").read_text())["backend"] == "local"
    assert "engine.backend=auto is local: 0.02 billion multiplications; " in (tmp_path / "run" / "run.log").read_text()

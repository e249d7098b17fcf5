"""Where a run is computed by `engine.backend: auto`: the rule, and what the run's folder says."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from fedfleet.engine import run
from fedfleet.engine.config.schema import experiment
from fedfleet.engine.run_spec import LEAST_STEP, RunSpec
from fedfleet.engine.workload.multiplications import multiplications
from fedfleet.tune.files import load
from fedfleet.workloads.data.characters import Characters
from fedfleet.workloads.data.digits import Digits
from fedfleet.workloads.models.gpt import Gpt
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


class Last(nn.Module):
    """The outputs of a recurrent layer at the last of 8 rows of an image."""

    def __init__(self, layer: nn.Module, width: int) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x.flatten(1, 2))[0][:, -1])


@pytest.mark.parametrize(
    ("layer", "gates"),
    [
        (nn.LSTM(8, 5, 2, batch_first=True), 4),
        (nn.GRU(8, 5, 2, batch_first=True), 3),
        (nn.RNN(8, 5, 2, batch_first=True), 1),
    ],
    ids=["lstm", "gru", "rnn"],
)
def test_multiplications_of_recurrent_layers(layer: nn.Module, gates: int):
    """At each of 8 places, the weights of the inputs and of the hidden states of two layers multiply once."""
    network = Last(layer, 5)
    assert of(Built(lambda: network)) == 8 * gates * 5 * ((8 + 5) + (5 + 5)) + 5 * 10


def of_gpt(length: int, width: int, depth: int, words: int) -> int:
    """Four projections and two layers of 4 width at each place, scores and sums of values for each pair, the logits."""
    return length * (depth * (12 * width**2 + 2 * length * width) + width * words)


def test_multiplications_of_attention():
    for model in (Gpt(16, 2, 4), Gpt(16, 2, 4, positions="rope", norm="rms")):
        workload = Characters(path="none.txt", model=model, length=6)
        assert multiplications(workload) == of_gpt(6, 16, 2, workload.classes)
    encoder = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)
    network = nn.Sequential(nn.Flatten(1, 2), encoder, nn.Flatten(), nn.Linear(64, 10))
    assert of(Built(lambda: network)) == 8 * (4 * 8 * 8 + 2 * 8 * 8 + 2 * 8 * 12) + 64 * 10


def test_a_large_network_gets_no_numbers(monkeypatch: pytest.MonkeyPatch):
    workload = Characters(path="none.txt", model=Gpt(16, 2, 4), length=6)
    monkeypatch.setattr("fedfleet.engine.workload.multiplications.SMALL", 0)
    assert multiplications(workload) == of_gpt(6, 16, 2, workload.classes)


def test_a_short_run_of_a_transformer_is_computed_here(tmp_path: Path):
    text = tmp_path / "text.txt"
    text.write_text("a client has rows of its own " * 100)
    workload = {"name": "characters", "path": str(text), "length": 8, "model": {"name": "gpt", "width": 16, "depth": 1}}
    federation = {"clients": 4, "cohort": 2, "rounds": 3, "local": {"steps": 2, "batch": 4}}
    method = {"name": "fedavg", "rule": {"name": "sgd", "lr": 0.1}}
    spec = RunSpec.of("short", experiment({"workload": workload, "method": method, "federation": federation}))
    assert spec.backend.name == "local"
    assert spec.multiplications() == 3 * 2 * 2 * max(LEAST_STEP, 4 * of_gpt(8, 16, 1, Characters.classes))


@pytest.mark.parametrize(
    "network",
    [
        nn.Sequential(nn.Flatten(), nn.Bilinear(64, 64, 10)),
        broken(nn.Sequential(nn.Flatten(), nn.Linear(64, 10))),
    ],
    ids=["bilinear", "broken"],
)
def test_what_cannot_be_counted(network: nn.Module):
    assert of(Built(lambda: network)) == math.inf


def test_the_folder_says_where_and_why(tmp_path: Any):
    short = load("digits", ["federation.rounds=1", "tracking.uri=none"])
    run(short, tmp_path / "run")
    assert json.loads((tmp_path / "run" / "run.json").read_text())["backend"] == "local"
    assert "engine.backend=auto is local: 0.02 billion multiplications; " in (tmp_path / "run" / "run.log").read_text()

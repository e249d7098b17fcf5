"""Every workload of the studies of papers: its size, a round on synthetic data, some rounds on the real files."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedfleet.engine import Observer, run
from fedfleet.engine.config.registry import Registry, resolve, signature
from fedfleet.engine.config.schema import Experiment, experiment
from fedfleet.engine.errors import ConfigError
from fedfleet.tune.show import describe
from fedfleet.workloads.table import WORKLOADS

RNN = {"name": "rnn"}
TINY = {"name": "rnn", "hidden": 6}
WORDS = {"vocabulary": 300, "length": 9, "embedding": 5}
FROZEN = {"embeddings": "frozen"}

STUDIES: list[tuple[str, dict[str, Any], int, dict[str, Any]]] = [
    # name, arguments at full size, parameters, what is smaller in the round below
    ("fashion_mnist", {"model": "lenet"}, 61_706, {}),
    ("fashion_mnist", {"model": "cnn4"}, 390_880, {}),
    ("svhn", {"model": "cnn4"}, 399_136, {}),
    ("cifar10", {"model": "cnn10"}, 4_719_328, {}),
    ("cifar100", {"model": "cnn10"}, 4_765_408, {}),
    ("cifar10", {"model": {"name": "resnet18", "norm": "batch"}}, 11_173_962, {}),
    ("cifar10", {"model": "resnet18"}, 11_173_962, {}),
    ("cifar100", {"model": "resnet18"}, 11_220_132, {}),
    # 200 classes instead of 10: 190 more outputs with 512 weights and a bias each.
    ("tiny_imagenet", {"model": "resnet18"}, 11_173_962 + 190 * 513, {}),
    ("cifar10", {"model": "vit"}, 9_523_722, {"model": {"name": "vit", "width": 16, "depth": 1}}),
    ("cifar100", {"model": "vit"}, 9_523_722 + 90 * 513, {"model": {"name": "vit", "width": 16, "depth": 1}}),
    ("femnist", {"model": "femnist_cnn"}, 1_206_590, {}),
    ("shakespeare", {"model": "lstm"}, 1_093_199, {"model": {"name": "lstm", "hidden": 8}}),
    ("sentiment140", {"model": RNN, **FROZEN}, 51_585_026, {"model": TINY, **WORDS}),
    ("sst2", {"model": RNN, **FROZEN}, 51_585_026, {"model": TINY, **WORDS}),
    ("yelp", {"model": RNN, **FROZEN}, 51_585_026, {"model": TINY, **WORDS}),
    ("sst2", {"model": RNN}, 51_585_026 + 10_000 * 300, {"model": TINY, **WORDS}),
    ("imdb", {"model": "rnn"}, 51_585_026 + 10_000 * 300, {"model": TINY, **WORDS}),
    ("mnist", {"model": "lenet"}, 61_706, {}),
]
IDS = [f"{name}-{re.sub(r'[^a-z0-9]+', '-', str(arguments))}" for name, arguments, _, _ in STUDIES]
LARGE = ("resnet18", {"name": "resnet18", "norm": "batch"}, "cnn10")
AUC = [("sst2", {"model": TINY, **WORDS, **FROZEN}), ("yelp", {"model": TINY, **WORDS})]


def plan(workload: dict[str, Any], rounds: int = 1, **more: Any) -> Experiment:
    return experiment(
        {
            "workload": workload,
            "method": {"name": "fedavg", "rule": {"name": "sgd", "lr": 0.05}},
            "federation": {"clients": 5, "cohort": 2, "rounds": rounds, "local": {"steps": 1, "batch": 3}},
            "engine": {"backend": "local", "block": 1},
            "tracking": {"uri": "none"},
            **more,
        }
    )


ALIKE = [("sentiment140", RNN), ("yelp", RNN), ("imdb", "rnn")]
"""Whose network is that of sst2."""


@pytest.mark.parametrize(
    ("name", "arguments", "count", "_"),
    [pytest.param(*one, marks=pytest.mark.long if (one[0], one[1]["model"]) in ALIKE else ()) for one in STUDIES],
    ids=IDS,
)
def test_full_size_is_shown_without_the_files(name: str, arguments: dict[str, Any], count: int, _: Any, tmp_path: Path):
    shown = describe(plan({"name": name, **arguments, "data_root": str(tmp_path)}))
    assert re.search(rf"^total +{count:,}$", shown, re.M), shown
    assert re.search(r"^no data: .+ in .+, got no such files; .+$|^no data: .+ must .+", shown, re.M), shown


@pytest.mark.parametrize(
    ("name", "arguments", "_", "smaller"),
    [pytest.param(*study, marks=pytest.mark.long if study[1]["model"] in LARGE else ()) for study in STUDIES],
    ids=IDS,
)
def test_a_round_on_a_stand_in(name: str, arguments: dict[str, Any], _: int, smaller: dict[str, Any]):
    spec = {"name": name, **arguments, **smaller, "stand_in": 60}
    result = run(plan(spec, evaluate={"every": 0, "batch": 15}))
    assert np.isfinite(result.metrics["train/loss"])
    assert 0 <= result.metrics["eval/accuracy"] <= 1
    wanted = {"shakespeare": "eval/perplexity", "sst2": "eval/auc"}
    assert wanted.get(name, "eval/loss") in result.metrics


@pytest.mark.parametrize(("name", "arguments"), AUC, ids=lambda v: str(v)[:5])
def test_auc_on_a_stand_in(name: str, arguments: dict[str, Any]):
    rare = {"name": "positive_ratio", "ratios": [0.3]}
    spec = {"name": name, **arguments, "stand_in": 80, "partition": rare}
    result = run(plan({"name": "auc", "of": spec}))
    assert 0 <= result.metrics["eval/auc"] <= 1


def test_stand_ins_can_be_learnt():
    """Random guesses would have an accuracy of one tenth."""
    run_spec = plan(
        {"name": "cifar10", "model": "logistic", "augment": [], "stand_in": 200},
        rounds=20,
        federation={"clients": 5, "cohort": 5, "rounds": 20, "local": {"steps": 4, "batch": 20}},
        method={"name": "fedavg", "rule": {"name": "sgd", "lr": 0.01}},
    )
    assert run(run_spec).metrics["eval/accuracy"] > 0.6


def test_stand_ins_are_refused():
    with pytest.raises(ConfigError, match="stand_in=-1"):
        run(plan({"name": "cifar10", "stand_in": -1}))
    with pytest.raises(ConfigError, match=r"glove must be a file of word vectors, got no file none\.txt"):
        run(plan({"name": "sst2", "glove": "none.txt", "data_root": "."}))


# --- global randomness ------------------------------------------------------------------------------------------------
class Reseeding(Observer):
    """Seeds every global generator again after each round."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def begin(self, run_spec: Any) -> None:
        self.record({})

    def record(self, record: Any) -> None:
        for reseed in (random.seed, np.random.seed, torch.manual_seed):
            reseed(self.seed)

    def event(self, text: str) -> None:
        self.record({})


SMALL: dict[str, dict[str, Any]] = {
    "shakespeare": {"model": {"name": "lstm", "hidden": 4, "dropout": 0.3}, "stand_in": 24, "partition": "iid"},
    **{name: {"model": {**TINY, "dropout": 0.3}, **WORDS} for name in ("sst2", "sentiment140", "yelp", "imdb")},
    "parquet_text": {"model": TINY, **WORDS},
    "femnist": {"model": {"name": "femnist_cnn", "dropout": [0.25, 0.5]}},
    **{name: {"model": {"name": "mlp", "hidden": [2]}} for name in ("tiny_imagenet", "cifar100", "svhn")},
    "cifar10": {"model": {"name": "vit", "width": 8, "depth": 1, "heads": 2, "head": 4, "mlp": 8}},
    "noisy": {"scale": 0.1, "law": "stable", "flips": 0.1, "features": 0.1},
    "linear": {"dim": 20},
    "quadratic": {"noise": 0.5},
}
"""Arguments that use all randomness that there is, with models that are fast."""


def small(name: str) -> dict[str, Any]:
    parameters = signature(resolve(Registry().tables["WORKLOADS"][name]))[1]
    usual = {"of": "digits", "stand_in": 48}
    return {"name": name, **{k: v for k, v in usual.items() if k in parameters}, **SMALL.get(name, {})}


OWN_FILES = ("table", "characters", "causal_lm", "roles", "instruct", "text_classes")
OWN_ROWS = [name for name in WORKLOADS if name not in OWN_FILES]
"""The workloads that have rows by themselves or stand-ins. Those of a user's table are in test_forms.py, and those of a
user's text in test_language.py, and those of roles in test_roles.py."""


@pytest.mark.parametrize("name", OWN_ROWS)
def test_neither_blocks_nor_global_generators_move_anything(name: str):
    """With crops, flips, dropout and noise, in float64: blocks of one client and of four unequal clients agree, though
    the generators are seeded before, between and after the two rounds with one number and with another."""
    federation = {"clients": 6, "cohort": 4, "rounds": 2, "local": {"epochs": 1, "batch": 5}}
    results = []
    for block in (1, 4):
        engine = {"backend": "local", "block": block, "dtype": "float64"}
        experiment = plan(small(name), federation=federation, engine=engine)
        results.append(run(experiment, observers=[Reseeding(block)]))
    for key, alone in results[0].model.items():  # some tens of float64 operations; stable draws have large values
        assert torch.allclose(alone, results[1].model[key], rtol=1e-7, atol=1e-9), key
    for key, value in results[0].metrics.items():
        assert value == pytest.approx(results[1].metrics[key], rel=1e-6, abs=1e-9), key


# --- the real files ---------------------------------------------------------------------------------------------------
REAL = {
    "fashion_mnist": {"model": "lenet"},
    "mnist": {"model": "lenet", "partition": "natural"},
    "cifar10": {"model": "lenet"},
    "cifar100": {"model": "lenet"},
    "tiny_imagenet": {"model": "lenet"},
    "shakespeare": {"model": {"name": "lstm", "hidden": 32, "layers": 1}, "embedding": 8},
    "sst2": {"model": {"name": "rnn", "hidden": 16}, "embedding": 16},
    "sentiment140": {"model": {"name": "rnn", "hidden": 16}, "embedding": 16, "partition": "natural"},
    "yelp": {"model": {"name": "rnn", "hidden": 16}, "embedding": 16, "length": 40, "partition": "natural"},
    "imdb": {"model": {"name": "rnn", "hidden": 16}, "embedding": 16, "length": 40},
}


@pytest.mark.long
@pytest.mark.parametrize("name", REAL)
def test_real_files_train(name: str, real_set: Callable[[str], Path]):
    """Some rounds of FedAvg lower the training loss."""
    spec = {"name": name, **REAL[name], "data_root": str(real_set(name).parent)}
    federation = {"clients": 8, "cohort": 8, "rounds": 6, "local": {"steps": 5, "batch": 32}}
    rule = {"name": "momentum", "lr": 0.05}
    result = run(plan(spec, federation=federation, method={"name": "fedavg", "rule": rule}, evaluate={"every": 0}))
    losses = [row["train/loss"] for row in result.rows]
    assert min(losses[3:]) < losses[0], losses
    assert np.isfinite(result.metrics["eval/loss"])

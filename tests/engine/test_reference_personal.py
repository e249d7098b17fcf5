"""Whole runs of methods whose clients have models of their own, against `tests.reference.personal`: clients with other
numbers of rows, batches that do not divide them, several visits, clients that are never drawn, means by examples."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

from fedfleet.engine import Result, run
from fedfleet.engine.clients.batches import stream
from fedfleet.engine.cohorts.samplers import CountedSampler
from fedfleet.engine.config.schema import Local, experiment
from fedfleet.workloads.classification import Classification
from fedfleet.workloads.client_index import ClientIndex
from fedfleet.workloads.workload import Columns, Model, Partition
from tests.reference import personal as reference

SIZES = (9, 5, 12, 7, 8)
COHORTS = ((0, 2), (1, 2, 4), (0, 1), (0, 2, 4))
"""Client 3 is never drawn."""
INPUTS, HIDDEN, CLASSES, SEED = 4, 5, 3, 11
CLOSE = 1e-10
"""Sums of float64 in another order, of numbers of about 1 over some dozen steps; absolute."""


@dataclass(frozen=True)
class Small(Model):
    norm: bool = False

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        first = nn.Linear(INPUTS, HIDDEN, bias=not self.norm)
        norm = [nn.BatchNorm1d(HIDDEN)] if self.norm else []
        return nn.Sequential(first, *norm, nn.Tanh(), nn.Linear(HIDDEN, classes))


@dataclass(frozen=True)
class Runs(Partition):
    def deal(self, labels: np.ndarray, clients: int, seed: int) -> ClientIndex:
        return ClientIndex.of(np.split(np.arange(len(labels)), np.cumsum(SIZES)[:-1]))


@dataclass(frozen=True)
class Blobs(Classification):
    model: Model = Small()
    partition: Partition = Runs()
    classes = CLASSES
    shape = (INPUTS,)

    def load(self) -> tuple[Columns, Columns]:
        draw = np.random.default_rng(SEED)
        label = draw.integers(0, CLASSES, sum(SIZES))
        columns = {"input": draw.normal(size=(len(label), INPUTS)) + label[:, None], "label": label}
        return columns, columns


@dataclass(frozen=True)
class Listed(CountedSampler):
    def cohort(self, seed: int, number: int, clients: int, size: int) -> np.ndarray:
        return np.array(COHORTS[(number - 1) % len(COHORTS)])


WORKLOADS = {"blobs": Blobs, "blobs_norm": lambda: Blobs(Small(norm=True))}
SAMPLERS = {"listed": Listed}


@cache
def task(
    norm: bool, steps: int | None, batch: int, examples: bool, cohorts: tuple[tuple[int, ...], ...] = COHORTS
) -> reference.Task:
    """steps: None for one pass over a client's rows in each visit. examples: whether means are by clients' rows."""
    workload = WORKLOADS["blobs_norm" if norm else "blobs"]()
    columns, _ = workload.load()
    index = Runs().deal(columns["label"], len(SIZES), SEED)
    of_clients = np.split(np.arange(sum(SIZES)), np.cumsum(SIZES)[:-1])
    start = torch.cat([value.double().flatten() for value in workload.init(SEED).values()]).numpy()
    local = Local(steps=steps, batch=batch) if steps else Local(epochs=1, batch=batch)
    visited, visits = np.zeros(len(SIZES), np.int64), []
    for cohort in cohorts:
        drawn = stream(index, np.array(cohort), visited[list(cohort)], local, SEED)
        real = np.ones(drawn.rows.shape, bool) if drawn.weight is None else drawn.weight.numpy() > 0
        own = {}
        for place, i in enumerate(cohort):
            taken = range(int(drawn.steps[place]))
            own[i] = [drawn.rows[place, k].numpy()[real[place, k]] - of_clients[i][0] for k in taken]
        visits.append(own)
        visited[list(cohort)] += 1
    rows = [(columns["input"][some], columns["label"][some]) for some in of_clients]
    network = reference.Network(INPUTS, HIDDEN, CLASSES, norm)
    weights = np.array(SIZES, float) if examples else np.ones(len(SIZES))
    return reference.Task(network, start, rows, visits, weights)


def made(method: dict[str, Any], norm: bool = False, local: Any = None, **more: Any) -> Any:
    """The experiment. more: further sections."""
    clients = {"own": True, **more.pop("clients", {})}
    federation = {
        "clients": len(SIZES),
        "cohort": 2,
        "rounds": len(COHORTS),
        "local": local or {"steps": 3, "batch": 4},
        "sampler": "listed",
        "weights": more.pop("weights", "uniform"),
        **more.pop("federation", {}),
    }
    return experiment(
        {
            "plugins": [__name__],
            "workload": "blobs_norm" if norm else "blobs",
            "method": method,
            "federation": federation,
            "engine": {"backend": "local", "dtype": "float64", "block": more.pop("block", 2)},
            "evaluate": {"every": 0, "clients": clients},
            "tracking": {"uri": "none"},
            "seed": SEED,
            **more,
        }
    )


def sgd(lr: float) -> dict[str, Any]:
    return {"name": "sgd", "lr": lr}


def compare(folder: Path, given: Any, expected: tuple[np.ndarray, list[np.ndarray]], at: reference.Task) -> Result:
    """Compare the server's model, and the losses of the clients' models on their training rows."""
    x, models = expected
    result = run(given, folder)
    found = np.concatenate([tensor.numpy().ravel() for tensor in result.model.values()])
    np.testing.assert_allclose(found, x, rtol=0, atol=CLOSE)
    table = pq.read_table(folder / "clients.parquet").to_pydict()
    losses = [at.loss(i, model) for i, model in enumerate(models)]
    name = "adapted" if "adapted_training_loss" in table else "own"
    np.testing.assert_allclose(table[f"{name}_training_loss"], losses, rtol=0, atol=CLOSE)
    return result


LOCAL = {"steps": {"steps": 3, "batch": 4}, "epochs": {"epochs": 1, "batch": 4}, "many": {"steps": 6, "batch": 3}}
TASKS = {"steps": (3, 4), "epochs": (None, 4), "many": (6, 3)}


def test_the_gradients_of_the_reference():
    for norm in (False, True):
        at = task(norm, 3, 4, False)
        inputs, label = at.rows[0]
        draw = np.random.default_rng(1)
        w = at.x0 + 0.3 * draw.normal(size=len(at.x0))
        moved = ~at.network.mask("mean", "var") if norm else np.ones(len(w), bool)
        v, step = draw.normal(size=len(w)) * moved, 1e-5
        losses = [at.network.loss(w + s * step * v, inputs, label, train=True) for s in (1, -1)]
        slope = (losses[0] - losses[1]) / (2 * step)
        np.testing.assert_allclose(slope, at.network.gradient(w, inputs, label)[moved] @ v[moved], rtol=1e-8)


OWN = {
    "ditto": ({"lam": 0.7}, {}),
    "ditto, initial": ({"lam": 2.0, "start": "initial", "server_lr": 0.6}, {}),
    "ditto, alone": ({"lam": 0.0, "start": "initial"}, {}),
    "pfedme": ({"lam": 3.0, "inner_steps": 3}, {}),
    "pfedme, previous": ({"lam": 3.0, "inner_steps": 2, "beta": 1.5, "decay": 0.02, "begin": "previous"}, {}),
    "apfl": ({"alpha": 0.4}, {}),
    "apfl, every": ({"alpha": 0.6, "update": "every", "lr_alpha": 0.5, "alpha_decay": 0.05, "start": "initial"}, {}),
    "apfl, never": ({"alpha": 0.25, "update": "never"}, {}),
}


@pytest.mark.parametrize(
    ("name", "local", "weights"),
    [(name, *how) for name, how in product(OWN, [("steps", "uniform"), ("epochs", "examples")])],
)
@pytest.mark.long
def test_whole_models_of_clients(name: str, local: str, weights: str, tmp_path: Path):
    settings, _ = OWN[name]
    base = name.partition(",")[0]
    method = {"name": base, "rule": sgd(0.3), "personal_rule": sgd(0.2), **settings}
    at = task(False, *TASKS[local], weights == "examples")
    expected = getattr(reference, base)(at, 0.3, 0.2, **settings)
    compare(tmp_path / "run", made(method, local=LOCAL[local], weights=weights), expected, at)


@pytest.mark.parametrize(("local", "block"), [("steps", 1), ("epochs", 2)])
def test_every_client_alone(local: str, block: int, tmp_path: Path):
    at = task(False, *TASKS[local], False)
    given = made({"name": "local_only", "rule": sgd(0.3)}, local=LOCAL[local], block=block)
    compare(tmp_path / "run", given, reference.local_only(at, 0.3), at)


HEAD = ("U", "c")
PARTIAL: dict[str, tuple[bool, dict[str, Any], tuple[str, ...], dict[str, Any]]] = {
    "fedper": (False, {"tensors": "head"}, HEAD, {}),
    "lg-fedavg": (False, {"tensors": "body", "rule": sgd(0.1)}, ("W", "b"), {"lr_personal": 0.1}),
    "fedrep": (False, {"tensors": "head", "split": [1, 1]}, HEAD, {"split": (1, 1)}),
    "fedrep, shared first": (
        False,
        {"tensors": "head", "split": [2, 1], "order": "shared"},
        HEAD,
        {"split": (2, 1), "order": "shared"},
    ),
    "averaged statistics": (True, {"tensors": "head"}, HEAD, {}),
    "fedbn": (True, {"tensors": "norm"}, ("scale", "shift", "mean", "var"), {}),
    "local statistics": (True, {"tensors": "statistics"}, ("mean", "var"), {}),
    "parameters of norms": (True, {"tensors": "norm_parameters"}, ("scale", "shift"), {}),
    "fedbn, fedrep": (
        True,
        {"tensors": "norm", "split": [1, 2]},
        ("scale", "shift", "mean", "var"),
        {"split": (1, 2)},
    ),
}


@pytest.mark.parametrize("name", PARTIAL)
@pytest.mark.parametrize(("local", "weights"), [("steps", "uniform"), ("epochs", "examples")])
@pytest.mark.long
def test_parts_of_models(name: str, local: str, weights: str, tmp_path: Path):
    norm, section, entries, more = PARTIAL[name]
    at = task(norm, *TASKS[local], weights == "examples")
    expected = reference.partial(at, 0.3, at.network.mask(*entries), **more)
    given = made({"name": "fedavg", "rule": sgd(0.3)}, norm, LOCAL[local], weights=weights, personal=section)
    compare(tmp_path / "run", given, expected, at)


@pytest.mark.parametrize("variant", ["fo", "hf"])
@pytest.mark.long
def test_meta_steps(variant: str, tmp_path: Path):
    at = task(False, *TASKS["many"], True)
    settings = {"lr_inner": 0.2, "variant": variant, "delta": 1e-3, "server_lr": 0.8}
    expected = reference.per_fedavg(at, 0.3, **settings)
    method = {"name": "per_fedavg", "rule": sgd(0.3), **settings}
    if variant == "fo":
        method.pop("delta")
        expected = reference.per_fedavg(at, 0.3, **{**settings, "delta": 1.0})
    compare(tmp_path / "run", made(method, local=LOCAL["many"], weights="examples"), expected, at)


@pytest.mark.parametrize("prox", [0.0, 0.6])
def test_fine_tuning(prox: float, tmp_path: Path):
    at = task(False, *TASKS["steps"], True)
    x, _ = reference.partial(at, 0.3, at.network.mask())
    models = [reference.tuned(at, i, x, 4, 0.25, prox) for i in at.clients]
    adapt = {"steps": 4, "rule": sgd(0.25), "batch": "all", "prox": prox}
    given = made({"name": "fedavg", "rule": sgd(0.3)}, weights="examples", clients={"adapt": adapt})
    compare(tmp_path / "run", given, (x, models), at)


@pytest.mark.long
def test_a_frozen_head_is_tuned(tmp_path: Path):
    at = task(False, *TASKS["epochs"], False)
    head = at.network.mask(*HEAD)
    x, _ = reference.partial(at, 0.3, at.network.mask(), head)
    models = [reference.tuned(at, i, x, 3, 0.25) for i in at.clients]
    adapt = {"steps": 3, "rule": sgd(0.25), "batch": "all"}
    given = made(
        {"name": "fedavg", "rule": sgd(0.3)},
        local=LOCAL["epochs"],
        personal={"frozen": "head"},
        clients={"adapt": adapt},
    )
    compare(tmp_path / "run", given, (x, models), replace(at))


EVERYONE = (tuple(range(len(SIZES))),) * 5
"""Cohorts of CFL, which has all clients in every round."""


@pytest.mark.parametrize(
    ("linkage", "weights", "eps1", "eps2"),
    [("single", "uniform", 0.25, 0.5), ("complete", "examples", 10.0, 0.6)],
    ids=["by the mean", "by the longest"],
)
def test_clusters_that_are_cut(linkage: str, weights: str, eps1: float, eps2: float, tmp_path: Path):
    """One bound, on the mean update or on the longest one, keeps all clients together in round 2; two cuts follow, of
    which the second one is of a cluster in front of another."""
    settings = {"eps1": eps1, "eps2": eps2, "least": 2, "after": 1, "most": 8, "linkage": linkage}
    at = task(False, *TASKS["steps"], weights == "examples", EVERYONE)
    x, models, path = reference.cfl(at, 0.3, **settings)
    assert [len(clusters) for clusters in path[:2]] == [1, 1]
    assert len(path[-1]) == 3
    federation = {"cohort": len(SIZES), "rounds": len(EVERYONE), "sampler": "uniform"}
    given = made({"name": "cfl", "rule": sgd(0.3), **settings}, weights=weights, federation=federation)
    result = compare(tmp_path / "run", given, (x, models), at)
    assert [row["server/clusters"] for row in result.rows] == [len(clusters) for clusters in path]
    found = pq.read_table(tmp_path / "run" / "clients.parquet").to_pydict()["cluster"]
    assert found == [next(j for j, members in enumerate(path[-1]) if i in members) for i in at.clients]

"""Metrics of whole test sets and of clients: they are exact, and the same in process and on Ray for any number of
workers and any batches."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet

from fedfleet.engine.api import run
from fedfleet.engine.clients.evaluation import client_columns, client_groups
from fedfleet.engine.config.schema import Experiment, experiment
from fedfleet.engine.errors import ConfigError, FedFleetError
from fedfleet.workloads.client_index import ClientIndex
from fedfleet.workloads.data.digits import Digits
from fedfleet.workloads.data.shakespeare import Shakespeare
from fedfleet.workloads.data.table import Table
from fedfleet.workloads.metrics import perplexity
from fedfleet.workloads.models.small import Mlp
from fedfleet.workloads.partitions.standard import Dirichlet
from fedfleet.workloads.problems.quadratic import Quadratic
from fedfleet.workloads.wrappers.noisy import Noisy

ROWS, TESTS = 120, 57


@pytest.fixture
def two_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data set of rows of three numbers, whose labels depend on the first number and on chance."""
    random = np.random.default_rng(0)
    (tmp_path / "data/table").mkdir(parents=True)
    for part, rows in (("train", ROWS), ("test", TESTS)):
        x = random.normal(size=(rows, 3))
        label = (x[:, 0] + random.normal(size=rows) > 0.5).astype(np.int64)
        parquet.write_table(pa.table({"input": list(x), "label": label}), tmp_path / f"data/table/{part}.parquet")
    monkeypatch.setenv("FEDFLEET_CACHE", str(tmp_path / "cache"))
    return tmp_path / "data"


def experiment_on(root: Path, batch: int = 10, **engine: Any) -> Experiment:
    workload = {"name": "table", "path": str(root / "table"), "model": "logistic"}
    return experiment(
        {
            "workload": {**workload, "partition": {"name": "dirichlet", "beta": 0.3}},
            "method": {"name": "fedavg", "rule": {"name": "sgd", "lr": 0.5}},
            "federation": {"clients": 12, "cohort": 4, "rounds": 4},
            "engine": {"backend": "local", **engine},
            "evaluate": {"every": 2, "batch": batch, "fairness": True},
            "tracking": {"uri": "none"},
        }
    )


def measured(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{k: v for k, v in row.items() if k.startswith("eval/")} for row in rows]


def test_auc_and_clients_are_those_of_the_final_model(two_classes: Path):
    """The metrics equal those of scikit-learn on all test rows at once, and plain means over each client's rows."""
    from sklearn.metrics import roc_auc_score

    result = run(experiment_on(two_classes))
    found = measured(result.rows)[-1]
    workload = Table(path=str(two_classes / "table"))
    train, test = workload.load()
    weight, bias = result.model["out.weight"].double().numpy(), result.model["out.bias"].double().numpy()

    def logits(columns: Any) -> np.ndarray:
        return columns["input"].astype(np.float64) @ weight.T + bias

    scores = logits(test) @ [-1, 1]
    # The ranks agree exactly unless two scores differ by no more than the rounding of float32.
    assert found["eval/auc"] == pytest.approx(roc_auc_score(test["label"], scores), abs=1e-12)
    right = logits(train).argmax(1) == train["label"]
    parts = Dirichlet(0.3).deal(train["label"], 12, 0)
    own = [right[rows].mean() for rows in np.split(parts.rows, parts.offsets[1:-1])]
    assert found["eval/clients/accuracy"] == pytest.approx(np.mean(own), abs=1e-12)
    assert found["eval/clients/accuracy_worst"] == pytest.approx(np.mean(np.sort(own)[:2]), abs=1e-12)
    assert found["eval/clients/loss_worst"] > found["eval/clients/loss"]
    assert not {"eval/score", "eval/label", "eval/clients/score"} & set(found)


@pytest.mark.long
def test_on_ray_and_in_process(two_classes: Path, ray_here: None):
    local = run(experiment_on(two_classes))
    for workers in (1, 2):
        there = run(experiment_on(two_classes, backend="ray", workers=workers))
        assert measured(there.rows) == measured(local.rows)
        assert there.model_sha256 == local.model_sha256


def test_ranks_do_not_depend_on_batches(two_classes: Path):
    """In float64, whose roundings change the order of no two scores, AUC is exactly the same, because it counts pairs;
    means differ by the order of the sums, some dozens of roundings."""
    few, many = (measured(run(experiment_on(two_classes, batch, dtype="float64")).rows)[-1] for batch in (7, 500))
    assert few["eval/auc"] == many["eval/auc"]
    assert few == pytest.approx(many, rel=1e-12)


def test_groups_hold_whole_clients():
    sizes = [3, 4, 3, 1, 12, 1, 9, 1]
    parts = ClientIndex(np.cumsum([0, *sizes]), np.arange(sum(sizes)))
    assert [(g.begin, g.end) for g in client_groups(parts, 10)] == [(0, 3), (3, 4), (4, 5), (5, 7), (7, 8)]
    assert [(g.begin, g.end) for g in client_groups(parts, 1)] == [(i, i + 1) for i in range(8)]


def test_worst_is_low_accuracy_and_high_loss():
    found = client_columns(Shakespeare(), {"loss": np.arange(20.0), "accuracy": np.arange(20.0)})
    assert found == {
        "eval/clients/loss": 9.5,
        "eval/clients/loss_worst": 18.5,
        "eval/clients/accuracy": 9.5,
        "eval/clients/accuracy_worst": 0.5,
    }


@dataclass(frozen=True)
class MeanError(Digits):
    """The report has the mean of a batch in the place of a column."""

    model: Any = Mlp((4,))

    def report(self, p, batch):
        columns = super().report(p, batch)
        return {**columns, "error": (1 - columns["accuracy"]).mean()}


def test_a_report_has_one_number_per_example():
    data = {
        "workload": MeanError(),
        "method": "fedavg",
        "federation": {"clients": 4, "cohort": 2, "rounds": 1, "local": {"steps": 1}},
        "engine": {"backend": "local"},
        "tracking": {"uri": "none"},
    }
    with pytest.raises(FedFleetError, match=r"one number per example, \(\d+,\) for this batch, got error with \(\); "):
        run(experiment(data))


def test_fairness_needs_rows_that_a_report_can_read():
    run_spec = experiment(
        {
            "workload": "quadratic",
            "method": {"name": "fedavg", "rule": {"name": "sgd", "lr": 0.1}},
            "federation": {"clients": 3, "cohort": 3, "rounds": 1},
            "engine": {"backend": "local"},
            "evaluate": {"fairness": True},
            "tracking": {"uri": "none"},
        }
    )
    with pytest.raises(ConfigError, match=r"evaluate.fairness: .* needs floor, hessian, optimum"):
        run(run_spec)


def test_perplexity():
    assert Shakespeare().summary({"loss": math.log(79), "accuracy": 0.0}, {}) == {"perplexity": pytest.approx(79)}
    assert perplexity(1e4) == math.inf


TWO = Table(path="", reshape=(1,), class_names=(0, 1))


def test_one_class_has_no_auc():
    assert TWO.summary({}, {"score": np.zeros(3), "label": np.ones(3)}) == {}
    assert Table(path="", reshape=(1,), class_names=(0, 1, 2)).whole == ()


def test_noise_hides_no_metric():
    noisy = Noisy(TWO, scale=1.0)
    assert noisy.whole == ("score", "label")
    assert noisy.summary({}, {"score": np.array([0.0, 1.0]), "label": np.array([0, 1])}) == {"auc": 1.0}
    assert Noisy(Quadratic()).whole == ()
    report = TWO.report(
        {name: value for name, value in TWO.init(0).items()},
        {"input": torch.ones(2, 1), "label": torch.tensor([0, 1])},
    )
    assert set(report) == {"loss", "accuracy", "score", "label"}


@dataclass(frozen=True)
class WorstMargin(Table):
    """Two classes, with a metric of its own in the place of AUC."""

    whole = ("margin",)

    def report(self, p, batch):
        logits = self.logits(p, batch)
        return {**super().report(p, batch), "margin": (logits[:, 1] - logits[:, 0]).abs()}

    def summary(self, means, columns):
        return {**super().summary(means, columns), "worst_margin": float(columns["margin"].min())}


def test_the_inherited_report_adds_no_means_of_labels_or_scores(two_classes: Path):
    workload = WorstMargin(path=str(two_classes / "table"), model=Mlp((4,)))
    rows = run(experiment_on(two_classes).model_copy(update={"workload": workload})).rows
    found = {name for name in measured(rows)[-1] if "clients" not in name}
    assert found == {"eval/loss", "eval/accuracy", "eval/worst_margin"}
    assert not {"eval/clients/score", "eval/clients/label"} & measured(rows)[-1].keys()

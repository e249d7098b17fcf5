"""Calibrated logits: golden values of losses and of runs, whose rows are counted, what is refused."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fedfleet.engine import run
from fedfleet.engine.cohorts.samplers import CountedSampler
from fedfleet.engine.config.schema import experiment
from fedfleet.engine.errors import ConfigError
from fedfleet.engine.fleet.table import SAMPLERS
from fedfleet.engine.runs.prepare import prepare
from fedfleet.workloads.classification import Classification
from fedfleet.workloads.client_index import ClientIndex
from fedfleet.workloads.models.small import Logistic
from fedfleet.workloads.partitions.standard import Iid
from fedfleet.workloads.workload import Split
from fedfleet.workloads.wrappers.calibrated import COUNTS, Calibrated

FOUND = json.loads(Path(__file__).with_name("calibrated.json").read_text(encoding="utf-8"))
ROWS = [np.array(rows, dtype=np.float64) for rows in FOUND["rows"]]
DIGITS = 1e-10
"""The values have at most 13 digits, of numbers of about 1; absolute."""


@dataclass(frozen=True)
class Few(Classification):
    """Three clients with rows of two features and one of three classes."""

    model: Logistic = Logistic()
    partition: Iid = Iid()
    classes = 3
    shape = (2,)

    def load(self):
        rows = np.concatenate(ROWS)
        columns = {"input": rows[:, :2], "label": rows[:, 2].astype(np.int64)}
        return columns, columns

    def split(self, seed, clients):
        train, test = self.load()
        ends = np.cumsum([len(rows) for rows in ROWS])
        return Split(train, test, ClientIndex.of(np.split(np.arange(ends[-1]), ends[:-1])))

    def init(self, seed):
        x = torch.tensor(FOUND["x0"], dtype=torch.float64)
        return {"out.weight": x[:6].view(3, 2), "out.bias": x[6:]}


@dataclass(frozen=True)
class Given(CountedSampler):
    """The cohorts of a golden run, again and again: the round behind the last one is drawn, too."""

    run: str

    def cohort(self, seed, number, clients, size):
        cohorts = FOUND["runs"][self.run]["cohorts"]
        return np.array(cohorts[(number - 1) % len(cohorts)])


def test_a_label_that_the_client_lacks_has_a_finite_loss():
    """As where an attack flips labels: the row's own class counts 1e-8, and its logit is 100 lower."""
    counts = torch.tensor([[3, 0, 0]], dtype=torch.int32)
    batch = {"input": torch.zeros(1, 2, dtype=torch.float64), "label": torch.tensor([1]), COUNTS: counts}
    p = {"out.weight": torch.zeros(3, 2, dtype=torch.float64), "out.bias": torch.zeros(3, dtype=torch.float64)}
    lower = 100 - 3**-0.25
    (found,) = Calibrated(Few(), absent="exclude").losses(p, batch)
    assert float(found) == pytest.approx(lower + np.log1p(np.exp(-lower)), rel=1e-12)


def few(workload, sampler="uniform", **more):
    plan = {"clients": 3, "cohort": 2, "rounds": 3, "local": {"steps": 2, "batch": 8}, "sampler": sampler}
    return experiment(
        {
            "workload": workload,
            "method": {"name": "fedavg", "rule": {"name": "sgd", "lr": 0.1}},
            "federation": plan,
            "engine": {"backend": "local", "dtype": "float64", "block": 2, "kernels": "torch"},
            "evaluate": {"every": 0},
            "tracking": {"uri": "none"},
            **more,
        }
    )


@pytest.mark.parametrize("piece", FOUND["pieces"], ids=range(len(FOUND["pieces"])))
def test_golden_values(piece):
    workload = Calibrated(Few(), tau=piece["tau"], absent=piece["absent"], over=piece["over"])
    p = {"out.weight": torch.zeros(3, 2, dtype=torch.float64), "out.bias": torch.tensor(piece["logits"]).double()}
    counts, label = torch.tensor([piece["counts"]]), torch.tensor([piece["label"]])
    batch = {"input": torch.zeros(1, 2).double(), "label": label, COUNTS: counts}
    assert float(workload.losses(p, batch)) == pytest.approx(piece["loss"], abs=DIGITS)


SETTINGS = {"fedlc tau=0.5, floor": {"tau": 0.5}, "balanced softmax": {"kind": "balanced"}}


@pytest.mark.parametrize("name", SETTINGS)
def test_golden_values_of_runs(name, monkeypatch):
    monkeypatch.setitem(SAMPLERS, "given", Given)
    found = run(few(Calibrated(Few(), **SETTINGS[name]), {"name": "given", "run": name})).model
    flat = torch.cat([found["out.weight"].flatten(), found["out.bias"]])
    np.testing.assert_allclose(flat, FOUND["runs"][name]["x"][-1], rtol=0, atol=DIGITS)


def test_equal_counts_are_plain_cross_entropy():
    workload = Calibrated(Few(), tau=0.7)
    p = {name: value.double() for name, value in Few().init(0).items()}
    batch = {"input": torch.from_numpy(ROWS[0][:, :2]), "label": torch.from_numpy(ROWS[0][:, 2].astype(np.int64))}
    equal = workload.losses(p, {**batch, COUNTS: torch.full((len(ROWS[0]), 3), 4)})
    torch.testing.assert_close(equal, Few().losses(p, batch), rtol=1e-12, atol=1e-12)


def test_rows_that_are_trained_on_are_counted():
    """Neither those that clients hold out nor those for validation."""
    spec = prepare(few({"name": "calibrated", "of": "digits"}, evaluate={"held_out": 0.25, "validation": 0.25}), "test")
    split = spec.split()
    index, label = split.client_index, split.train["label"]
    for i in range(3):
        rows = index.rows[index.offsets[i] : index.offsets[i + 1]]
        expected = np.bincount(label[rows], minlength=10)
        assert (split.train[COUNTS][rows] == expected).all()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"tau": -1.0}, "tau"),
        ({"kind": "balanced", "tau": 2.0}, "tau is the strength of fedlc, got tau=2.0 with kind=balanced"),
        ({"of": "quadratic"}, "calibrated needs the column label with class numbers, got Quadratic"),
    ],
)
def test_refusals(spec, message):
    with pytest.raises(ConfigError, match=message):
        prepare(few({"name": "calibrated", "of": "digits", **spec}), "test")


def test_a_client_of_one_class_has_no_others():
    one = replace(Calibrated(Few()), absent="exclude", over="others")
    split = Few().split(0, 3)
    label = np.where(np.arange(len(split.train["label"])) < len(ROWS[0]), 0, split.train["label"])
    with pytest.raises(ValueError, match="needs two classes of every client, got one of client 0; choose"):
        one.prepared(split._replace(train={**split.train, "label": label}))

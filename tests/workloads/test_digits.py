"""scikit-learn's digits: the split is always the same, and a model learns them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedfleet.workloads.data import digits as module
from fedfleet.workloads.data.digits import Digits
from fedfleet.workloads.models.small import Logistic
from fedfleet.workloads.partitions.standard import Dirichlet, Iid


def test_rows_and_classes():
    train, test = Digits().load()
    assert train["input"].shape == (1442, 1, 8, 8)
    assert test["input"].shape == (355, 1, 8, 8)
    assert train["input"].dtype == np.float32
    assert (train["input"].min(), train["input"].max()) == (0.0, 1.0)
    assert np.bincount(train["label"]).tolist() == [143, 146, 142, 147, 145, 146, 145, 144, 140, 144]
    assert np.bincount(test["label"]).tolist() == [35, 36, 35, 36, 36, 36, 36, 35, 34, 36]


def test_the_test_set_does_not_depend_on_seed_or_clients():
    one, other = Digits().split(0, 10), Digits(partition=Dirichlet(0.1)).split(5, 3)
    for name in ("input", "label"):
        assert np.array_equal(one.test[name], other.test[name])
        assert np.array_equal(one.train[name], other.train[name])


def test_a_linear_model_learns_them():
    workload = Digits(Logistic(), Iid())
    train, test = ({name: torch.from_numpy(v) for name, v in rows.items()} for rows in workload.load())
    p = workload.init(0)
    for _ in range(100):
        gradient = torch.func.grad(lambda p: workload.losses(p, train).mean())(p)
        p = {name: value - gradient[name] for name, value in p.items()}
    assert workload.report(p, test)["accuracy"].mean() > 0.93


def test_without_scikit_learn(monkeypatch):
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install scikit-learn"):
        Digits().check()

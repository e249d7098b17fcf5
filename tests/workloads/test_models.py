"""Models: sizes, errors, and each client's own gradient when many clients run at once."""

from __future__ import annotations

import math
import pickle
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch.func import grad, vmap

from fedfleet.workloads.classification import Classification
from fedfleet.workloads.data.digits import Digits
from fedfleet.workloads.models.small import LeNet, Logistic, Mlp


@dataclass(frozen=True)
class Clothes(Classification):
    """Random images in the shapes of FashionMNIST."""

    classes: ClassVar[int] = 10
    shape: ClassVar[tuple[int, ...]] = (1, 28, 28)
    mean: ClassVar[tuple[float, ...]] = (0.2860,)
    std: ClassVar[tuple[float, ...]] = (0.3530,)

    def load(self):
        random = np.random.default_rng(0)
        rows = {"input": random.integers(0, 256, (12, 1, 28, 28), dtype=np.uint8), "label": np.arange(12) % 10}
        return rows, rows


def count(workload: Classification) -> int:
    return sum(value.numel() for value in workload.init(0).values())


def test_parameter_counts():
    assert count(Clothes(LeNet(), None)) == 61_706  # pyright: ignore[reportArgumentType]
    assert count(Digits(Mlp((64, 32)))) == 65 * 64 + 65 * 32 + 33 * 10
    assert count(Digits(Logistic())) == count(Digits(Mlp(()))) == 65 * 10


def test_lenet_follows_the_shape_of_its_inputs():
    for side in (12, 13, 28, 32):
        assert LeNet().build((3, side, side + 1), 7)(torch.zeros(2, 3, side, side + 1)).shape == (2, 7)


@pytest.mark.parametrize("shape", [(1, 8, 8), (1, 28, 11), (64,)])
def test_lenet_refuses_small_inputs(shape):
    with pytest.raises(ValueError, match="lenet needs inputs"):
        LeNet().build(shape, 10)


def test_a_model_that_does_not_fit_is_found_by_check():
    with pytest.raises(ValueError, match=r"lenet needs .* got shape=\(1, 8, 8\)"):
        Digits(LeNet()).check()


def test_mlp_refuses_empty_layers():
    with pytest.raises(ValueError, match="hidden"):
        Mlp((64, 0))


@pytest.mark.parametrize("model", [Logistic(), Mlp((16,)), LeNet()], ids=str)
def test_gradients_together_equal_one_at_a_time(model):
    """In float64, sums of at most 784 products differ only by their order, some 1e-13."""
    clients, size = 3, 4
    workload = Clothes(model, None)  # pyright: ignore[reportArgumentType]
    rows = workload.load()[0]
    x, labels = (torch.from_numpy(rows[name]).view(clients, size, *rows[name].shape[1:]) for name in ("input", "label"))
    each = [{name: v.double() for name, v in workload.init(seed).items()} for seed in range(clients)]
    p = {name: torch.stack([one[name] for one in each]) for name in each[0]}

    def loss(p, x, label):
        return workload.losses(p, {"input": x, "label": label}).mean()

    together = vmap(grad(loss))(p, x, labels)
    for client, one in enumerate(each):
        alone = {name: value.clone().requires_grad_() for name, value in one.items()}
        loss(alone, x[client], labels[client]).backward()
        for name, value in alone.items():
            assert value.grad is not None
            assert torch.allclose(together[name][client], value.grad, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("model", [Logistic(), Mlp((16,)), LeNet()], ids=str)
def test_a_workload_pickles_after_use(model):
    """A vectorised call leaves functorch's tensors in the module, which cannot be pickled."""
    workload = Clothes(model, Digits().partition)
    p = {name: value.expand(2, *value.shape) for name, value in workload.init(0).items()}
    x, label = torch.zeros(3, 1, 28, 28, dtype=torch.uint8), torch.zeros(3, dtype=torch.int64)

    def gradient(workload):
        return vmap(grad(lambda p: workload.losses(p, {"input": x, "label": label}).sum()))(p)["out.bias"]

    before = gradient(workload)
    other = pickle.loads(pickle.dumps(workload))
    assert other == workload
    assert torch.equal(gradient(other), before)  # the first use is in vectorised code, and builds the module


def test_the_seed_decides_the_weights_and_no_global_state_does(monkeypatch):
    def gpus(seed):
        raise AssertionError("a model's weights must not reseed the GPUs")

    monkeypatch.setattr(torch.cuda, "manual_seed_all", gpus)
    digits = Digits()
    first, again, other = digits.init(0), digits.init(0), digits.init(1)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["out.weight"], other["out.weight"])


def test_inputs_are_normalised_bytes():
    workload = Clothes(Logistic(), None)  # pyright: ignore[reportArgumentType]
    x = torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1).expand(2, 1, 28, 28)
    values = workload.inputs({"input": x}, torch.float64)[:, 0, 0, 0].tolist()
    assert values == pytest.approx([-0.2860 / 0.3530, (1 - 0.2860) / 0.3530], rel=1e-12)


def test_report_of_an_undecided_model():
    """With zero weights every example has the loss log 10, and class 0 is predicted."""
    digits = Digits(Logistic())
    p = {name: value.double() * 0 for name, value in digits.init(0).items()}
    test = {name: torch.from_numpy(rows) for name, rows in digits.load()[1].items()}
    report = digits.report(p, test)
    assert report["loss"].tolist() == pytest.approx([math.log(10)] * 355, rel=1e-12)
    assert report["accuracy"].sum() == (test["label"] == 0).sum()

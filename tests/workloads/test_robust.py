"""Adversarial weights of classes: objective, closed form, whose sign is turned, report.

TOLERANCE: float64, 100 examples and 10 classes, values near 1: 1e-10 leaves a factor of 1e4 over the roundings.
"""

import numpy as np
import pytest
import torch

from fedfleet.workloads.objectives import cross_entropy
from fedfleet.workloads.problems.robust import Robust

TOLERANCE = 1e-10
STRENGTH = 0.7


@pytest.fixture(scope="module")
def case():
    workload = Robust(strength=STRENGTH)
    rows = workload.split(0, 2).test
    batch = {name: torch.from_numpy(column[:100]) for name, column in rows.items()}
    p = {name: value.double() for name, value in workload.init(0).items()}
    losses = cross_entropy(workload.logits(p, batch), batch["label"]).numpy()
    return workload, p, batch, losses


def best(losses, label):
    """The best weights of the adversary and the value of F there, in closed form."""
    own = np.array([losses[label == c].sum() for c in range(10)]) / len(losses)
    away = own - losses.mean() / 10
    return away / STRENGTH, losses.mean() + (away**2).sum() / (2 * STRENGTH)


def test_closed_form(case):
    """At the best weights the gradient in the weights is zero, and F is less for all other weights."""
    workload, p, batch, losses = case
    a, value = best(losses, batch["label"].numpy())
    there = {**p, "dual.a": torch.from_numpy(a).requires_grad_()}
    objective = workload.objectives(there, batch).mean()
    assert float(objective.detach()) == pytest.approx(value, rel=TOLERANCE)
    (gradient,) = torch.autograd.grad(objective, there["dual.a"])
    np.testing.assert_allclose(gradient, 0, atol=TOLERANCE)
    for place in range(10):
        moved = a + 0.1 * np.eye(10)[place]
        less = workload.objectives({**p, "dual.a": torch.from_numpy(moved)}, batch).mean()
        assert float(less) == pytest.approx(value - STRENGTH * 0.01 / 2, rel=1e-9)


def test_the_weights_go_up_and_the_network_down(case):
    """The gradient of `losses` is that of the objective, with the opposite sign for the weights."""
    workload, p, batch, _ = case
    found = []
    for of in (workload.objectives, workload.losses):
        own = {name: value.clone().requires_grad_() for name, value in p.items()}
        found.append(dict(zip(own, torch.autograd.grad(of(own, batch).mean(), list(own.values())), strict=True)))
    for name, gradient in found[0].items():
        sign = -1 if name == "dual.a" else 1
        assert gradient.abs().max() > 1e-3
        torch.testing.assert_close(found[1][name], sign * gradient, rtol=TOLERANCE, atol=TOLERANCE)


def test_report(case):
    workload, p, batch, losses = case
    report = {name: column.numpy() for name, column in workload.report(p, batch).items()}
    right = workload.logits(p, batch).argmax(-1).numpy() == batch["label"].numpy()
    assert report["cross_entropy"].mean() == pytest.approx(losses.mean(), rel=TOLERANCE)
    assert report["loss"].mean() == pytest.approx(losses.mean(), rel=TOLERANCE), "the weights begin at 0"
    worst = min(right[batch["label"].numpy() == c].mean() for c in range(10))
    assert workload.summary({}, report) == {"worst_class": worst}


def test_no_restraint_is_refused():
    with pytest.raises(ValueError, match="0 < strength < infinity must hold, got strength=0"):
        Robust(strength=0.0)

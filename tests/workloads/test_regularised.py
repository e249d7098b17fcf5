"""Coupled weight decay: every gradient has it, at its own point, and no reported loss has it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedfleet.engine import run
from fedfleet.workloads import counted
from fedfleet.workloads.problems.quadratic import Quadratic
from fedfleet.workloads.wrappers.noisy import Noisy
from fedfleet.workloads.wrappers.regularised import Regularised
from tests.engine.setups import quadratic

DECAY = 0.3
SHAPE = {"dim": 4, "heterogeneity": 2.0}
PLAN = {"clients": 5, "cohort": 5, "rounds": 300, "local": {"steps": 3, "batch": 1}}


def decayed(method, plan):
    experiment = quadratic(method, {}, plan)
    return experiment.model_copy(update={"workload": Regularised(Quadratic(**SHAPE), DECAY)})


def test_the_gradient_has_it_and_the_loss_has_not():
    plain, with_decay = Noisy(Quadratic(4), scale=0.2), Regularised(Noisy(Quadratic(4), scale=0.2), DECAY)
    batch = {name: torch.from_numpy(np.array(rows[:1])) for name, rows in plain.split(0, 3).train.items()}
    x = torch.linspace(-1, 2, 4, dtype=torch.float64).requires_grad_()
    losses = [w.losses({"x": x}, {**batch, "key": counted.key(0)}).mean() for w in (plain, with_decay)]
    assert losses[0].item() == losses[1].item()
    one, other = (torch.autograd.grad(loss, x)[0] for loss in losses)
    torch.testing.assert_close(other - one, DECAY * x.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", [pytest.param("scaffold", marks=pytest.mark.long), "scaffold_vr"])
def test_corrected_methods_reach_the_regularised_optimum(name):
    """(mean of A_i^T A_i + decay I) x = mean of A_i^T b_i; with two gradients a batch each must have its own decay.
    SCAFFOLD-VR, the slower, is within 1e-9 after 300 rounds."""
    system = Quadratic(**SHAPE).system(0, 5)
    right = np.einsum("nki,nk->i", system.a, system.b) / 5
    x = run(decayed({"name": name, "rule": {"name": "sgd", "lr": 0.1}}, PLAN)).model["x"]
    np.testing.assert_allclose(x, np.linalg.solve(system.hessian + DECAY * np.eye(4), right), rtol=0, atol=1e-8)


def test_under_plain_steps_it_is_decoupled_decay():
    """BiClip with open thresholds is plain SGD, and decays after its step: y - lr g, then (1 - lr decay) of it. That
    order is (1 - lr decay) y - lr (1 - lr decay) g: the same as coupled decay at a step size of lr (1 - lr decay)."""
    plan, lr = {**PLAN, "rounds": 5}, 0.1
    rule = {"name": "biclip", "lr": lr, "u": float("inf"), "weight_decay": DECAY}
    decoupled = run(quadratic({"name": "fedavg", "rule": rule}, SHAPE, plan)).model["x"]
    shrunk = lr * (1 - lr * DECAY)
    experiment = decayed({"name": "fedavg", "rule": {"name": "sgd", "lr": shrunk}}, plan)
    same = Regularised(Quadratic(**SHAPE), lr * DECAY / shrunk)
    coupled = run(experiment.model_copy(update={"workload": same})).model["x"]
    torch.testing.assert_close(coupled, decoupled, rtol=1e-12, atol=1e-12)


def test_the_dual_group_is_left_alone():
    from fedfleet.workloads.problems.saddle import Saddle

    plain = Saddle()
    p = {name: value.double() for name, value in plain.init(0).items()}
    batch = {name: torch.from_numpy(np.array(rows[:1])) for name, rows in plain.split(0, 3).train.items()}
    batch["key"] = counted.key(0)
    moved = {name: (value + 1.0).requires_grad_() for name, value in p.items()}
    one, other = (
        torch.autograd.grad(w.losses(moved, batch).mean(), list(moved.values()))
        for w in (plain, Regularised(plain, DECAY))
    )
    for name, value, g, h in zip(moved, moved.values(), one, other, strict=True):
        expected = g if name.startswith("dual.") else g + DECAY * value.detach()
        torch.testing.assert_close(h, expected, rtol=1e-12, atol=1e-12)
    assert any(name.startswith("dual.") for name in moved)
    assert not all(name.startswith("dual.") for name in moved)


def test_bad_settings():
    with pytest.raises(ValueError, match="decay=-1"):
        Regularised(Quadratic(), -1.0)

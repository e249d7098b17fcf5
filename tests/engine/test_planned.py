"""Methods whose settings follow from the sizes of the run; each round uses its own lr; uniform means; the number of
gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fedfleet.algorithms.padamfed import padamfed
from fedfleet.engine import run
from fedfleet.engine.errors import ConfigError
from fedfleet.engine.runs.prepare import prepare

from .setups import EPOCHS, STEPS, digits


def final(method: Any, local: dict[str, int] = STEPS, **federation: Any) -> dict[str, torch.Tensor]:
    base = digits(method, local, rounds=4, dtype="float64")
    return run(base.model_copy(update={"federation": base.federation.model_copy(update=federation)})).model


def near(first: Any, second: Any) -> bool:
    """Whether two models agree. Tolerance: four rounds of about 100 roundings of numbers near 1, and some digits that
    are lost when displacements are divided by step sizes."""
    return all(torch.allclose(first[name], second[name], rtol=0, atol=1e-11) for name in first)


def test_sizes_come_from_the_run():
    """The run has 9 clients in each of 3 rounds, with 3 local steps."""
    method: Any = prepare(digits("padamfed", STEPS), "test").method()
    assert method.rule.lr == pytest.approx(1 / (3 * 3**0.5))
    assert method.server.gamma == pytest.approx((9 * 3) ** 0.25 / 3**0.75)
    assert method.direction.beta == 1.0  # (9 * 3 / 3) ** 0.5, cut
    assert prepare(digits(padamfed(), STEPS), "test").method() == method


def test_sizes_must_be_given_where_steps_differ():
    with pytest.raises(ConfigError, match=r"^method: lr, gamma and beta must be given with federation\.local\.epochs"):
        prepare(digits("padamfed", EPOCHS), "test")
    given = {"name": "padamfed", "lr": 0.01, "gamma": 0.05, "beta": 0.3}
    assert all(leaf.isfinite().all() for leaf in run(digits(given, EPOCHS)).model.values())


@pytest.mark.parametrize("name", ["fedavg_m", "scaffold_vr"])
def test_momentum_is_read_off_with_the_rounds_own_step_size(name):
    """With the rule momentum and mu = 0, clients send the mean direction instead; both agree while lr falls."""
    lr = {"schedule": "exponential", "start": 0.2, "decay": 0.5}
    read = final({"name": name, "rule": {"name": "sgd", "lr": lr}}, EPOCHS)
    sent = final({"name": name, "rule": {"name": "momentum", "mu": 0.0, "lr": lr}}, EPOCHS)
    assert near(read, sent)


def test_shared_momenta_are_uniform_means_whatever_the_weights():
    assert near(final("fedavg_m", weights="examples"), final("fedavg_m"))
    assert not near(final("fedavg", weights="examples"), final("fedavg"))


@pytest.mark.parametrize(("name", "gradients"), [("scaffold_m", 1), ("fedavg_vr", 2), ("stem", 2), ("fafed", 2)])
def test_gradients_are_counted(name, gradients):
    """Round 1 includes the gradients of a warm start, which is a pass over the batches of all clients."""
    experiment = digits(name, STEPS)
    warm = 0
    if prepare(experiment, "test").method().warm_start is not None:
        sizes = prepare(experiment, "test").split().client_index.sizes
        warm = int((-(-sizes // STEPS["batch"])).sum())
    for row in run(experiment).rows:
        assert row["client/gradients"] == gradients * row["client/steps"] + (warm if row["round"] == 1 else 0)

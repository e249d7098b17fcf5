"""A block of many clients equals the clients run alone.

Tolerances: vectorising changes the order of additions inside products and convolutions, so float32 agrees to some ulps
times the depth of the computation, 1e-5 relative to the largest entry; float64 to 1e-10 with six digits to spare.
"""

from __future__ import annotations

import pytest
import torch

from fedfleet.engine import run

from .setups import EPOCHS, METHODS, STEPS, digits

TOLERANCE = {"float32": 1e-5, "float64": 1e-10}


def apart(first, second) -> float:
    """The largest difference of two models, relative to the largest entry."""
    scale = max(float(t.abs().max()) for t in first.values())
    return max(float((first[name] - second[name]).abs().max()) for name in first) / scale


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("local", [STEPS, EPOCHS], ids=["steps", "epochs"])
@pytest.mark.parametrize("method", METHODS)
def test_together_equals_alone(method, local, dtype):
    # One round: more rounds would amplify the rounding that is measured.
    models = [run(digits(method, local, rounds=1, dtype=dtype, block=block)).model for block in (1, 4, 9)]
    assert apart(models[0], models[1]) < TOLERANCE[dtype]
    assert apart(models[0], models[2]) < TOLERANCE[dtype]


@pytest.mark.parametrize("method", ["scaffold", "fedmuon_bc"])
def test_together_equals_alone_over_rounds_with_state(method):
    models = [run(digits(method, EPOCHS, rounds=4, dtype="float64", block=block)).model for block in (1, 4)]
    assert apart(*models) < TOLERANCE["float64"]


def test_one_at_a_time_inside_blocks_is_the_same_as_blocks_of_one():
    kept = [run(digits("scaffold", EPOCHS, dtype="float64", **e)).model for e in ({"vectorise": False}, {"block": 1})]
    assert apart(*kept) < 1e-12  # only the bracketing of the sums over clients differs


def test_weights_by_examples_are_a_weighted_mean():
    """One round of one full-batch step of FedAvg from x: x - lr * sum of n_i grad_i / sum of n_i, which is the step of
    the cohort's pooled data; uniform weights give another model."""
    base = digits("fedavg", {"steps": 1, "batch": 2000}, rounds=1, dtype="float64")
    plan = base.federation.model_copy(update={"weights": "examples", "cohort": 30})
    pooled = base.federation.model_copy(update={"clients": 1, "cohort": 1})
    weighted = run(base.model_copy(update={"federation": plan})).model
    union = run(base.model_copy(update={"federation": pooled})).model
    uniform = run(base.model_copy(update={"federation": plan.model_copy(update={"weights": "uniform"})})).model
    assert apart(weighted, union) < 1e-12
    assert apart(weighted, uniform) > 1e-6


def test_a_short_batch_counts_its_own_examples_only():
    """A client whose rows do not fill the batch takes the mean over its rows, whether the batch is padded in a block or
    not."""
    big = [run(digits("fedavg", {"steps": 2, "batch": b}, rounds=1, dtype="float64")).model for b in (500, 2000)]
    assert apart(*big) < 1e-12
    assert all(bool(torch.isfinite(t).all()) for t in big[0].values())

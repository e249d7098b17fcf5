"""A local step of several batches is a step of one batch with all of their examples.

Tolerances: the parts of a batch are added up in another order, so float64 agrees to 1e-12 of the largest entry, with
four digits to spare, and float32 to 1e-5.
"""

import pytest
import torch
from torch import nn

from fedfleet.engine import run
from fedfleet.engine.clients.local_training import parts_of
from fedfleet.engine.errors import ConfigError
from fedfleet.workloads import counted
from fedfleet.workloads.data.digits import Digits
from fedfleet.workloads.models.norms import BatchNorm

from .setups import Built, digits
from .test_blocks import TOLERANCE, apart

PARTS = {"batch": 7, "accumulate": 4}


def both(method="fedavg", local=None, **engine):
    """Runs of two rounds: with batches of 28, and with four times seven of the same rows."""
    local = local or {"steps": 3}
    return [run(digits(method, {**local, **batch}, 2, **engine)) for batch in ({"batch": 28}, PARTS)]


@pytest.mark.parametrize(("block", "local"), [(1, {"steps": 3}), (4, {"epochs": 2})], ids=["alone", "together"])
def test_batches_of_a_step_are_one_batch(block, local):
    """Many of the unequal clients have fewer rows than a step takes, and their last batches are short."""
    whole, parts = both("scaffold", local, block=block, dtype="float64")
    assert apart(whole.model, parts.model) < TOLERANCE["float64"]
    for one, other in zip(whole.rows, parts.rows, strict=True):
        assert one["train/loss"] == pytest.approx(other["train/loss"], rel=1e-12)
        assert one["client/gradients"] == other["client/gradients"]


def test_data_parallel_workers_are_one_worker_with_all_rows():
    """H = 1: 30 workers that send the gradients of all their rows, weighted by how many these are, do what one worker
    does that takes all rows in three parts. An eps of 1e-3 keeps AdamW from amplifying what was rounded."""
    rule = {"name": "adamw", "lr": 0.01, "eps": 1e-3}
    method = {"name": "data_parallel", "rule": {"name": "clip", "radius": 1.0, "rule": rule}}
    many = digits(method, {"steps": 1, "batch": 2000}, dtype="float64")
    plan = many.federation.model_copy(update={"cohort": 30, "weights": "examples"})
    one = digits(method, {"steps": 1, "batch": 500, "accumulate": 3}, dtype="float64")
    alone = one.federation.model_copy(update={"clients": 1, "cohort": 1})
    models = [run(made.model_copy(update={"federation": f})).model for made, f in ((many, plan), (one, alone))]
    assert apart(*models) < TOLERANCE["float64"]


@pytest.mark.long
def test_the_losses_that_samplers_follow_are_those_of_all_parts():
    """Oort draws clients by the root mean square of the losses of their examples."""
    runs = []
    for batch in ({"batch": 28}, PARTS):
        made = digits("fedavg", {"steps": 2, **batch}, 4, dtype="float64")
        sampler = {"name": "oort", "explore": 0.2}
        runs.append(
            run(made.model_copy(update={"federation": made.federation.model_copy(update={"sampler": sampler})}))
        )
    whole, parts = runs
    assert apart(whole.model, parts.model) < TOLERANCE["float64"]


def normalised():
    """A network that normalises batches."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), BatchNorm(8), nn.Linear(8, 10))


@pytest.mark.long
def test_parts_without_a_row_of_their_client_change_nothing():
    """In a block, the parts of a small client's batch are padding alone, which BatchNorm must not see."""
    models = []
    for block in (1, 4):
        made = digits("fedavg", {"epochs": 1, "batch": 5, "accumulate": 30}, 2, block=block, dtype="float64")
        workload = Digits(Built(normalised))
        models.append(run(made.model_copy(update={"workload": workload})).model)
    assert any("running" in name for name in models[0])
    assert apart(*models) < TOLERANCE["float64"]


def test_parts_have_draws_of_their_own():
    key, weight = counted.key("step"), torch.tensor([0.5, 0.5, 0.0, 0.0, 0.0], dtype=torch.float64)
    batch = {"input": torch.arange(5), "key": key, "weight": weight}
    parts = list(parts_of(batch, 2))
    assert [part["input"].tolist() for _, part in parts] == [[0, 1], [2, 3], [4]]
    assert [float(share) for share, _ in parts] == [1, 0, 0]
    assert [part["weight"].tolist() for _, part in parts] == [[0.5, 0.5], [0.5, 0.5], [1]]
    assert parts[0][1]["key"] == key
    assert len({int(part["key"]) for _, part in parts}) == 3
    shares = [share for share, _ in parts_of({"input": torch.arange(5), "key": key}, 2)]
    assert shares == [2 / 5, 2 / 5, 1 / 5]


@pytest.mark.long
def test_compiled_kernels_see_the_parts():
    """The kernel that takes all steps in one call takes none."""
    whole, parts = both(kernels="chain")
    assert apart(whole.model, parts.model) < TOLERANCE["float32"]


def test_a_step_of_too_many_examples_is_refused():
    with pytest.raises(ConfigError, match=r"accumulate: a local step has at most 2147483647 examples, .*; lower it"):
        digits("fedavg", {"steps": 1, "batch": 2**16, "accumulate": 2**16})

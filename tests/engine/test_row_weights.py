"""Rows that count differently: the mean of a batch, of its parts, of a block and of an evaluation is that over weights.

Tolerances: sums in another order agree to 1e-12 in float64.
"""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from fedfleet.engine import run
from fedfleet.engine.errors import ConfigError
from fedfleet.workloads.data.digits import Digits
from fedfleet.workloads.models.small import Mlp
from fedfleet.workloads.partitions.sizes import LogNormal
from fedfleet.workloads.workload import HELD_OUT

from .setups import digits
from .test_blocks import TOLERANCE, apart


@dataclass(frozen=True)
class Counted(Digits):
    """Rows that count as 0 to 6 ones; `times`: each of them so often."""

    times: int = 1

    def load(self):
        return tuple(
            {**columns, "count": (np.arange(len(columns["label"])) % 7).astype(np.int64)} for columns in super().load()
        )

    def split(self, seed, clients):
        split = super().split(seed, clients)
        held_out = np.arange(len(split.train["label"])) % 4 == 0
        return split._replace(train={**split.train, HELD_OUT: held_out})

    def row_weights(self, batch):
        return batch["count"] * self.times


def counted(local, kind=Counted, **engine):
    made = digits("fedavg", {"steps": 3, **local}, 2, dtype="float64", **engine)
    update = {"workload": kind(Mlp((16,)), LogNormal(1.0)), "evaluate": made.evaluate.model_copy(update={"every": 1})}
    return made.model_copy(update=update)


@pytest.mark.parametrize("block", [1, 4])
def test_parts_of_a_batch_are_weighted_by_their_sums(block):
    """Parts of one row have weights from 0 to 6, and blocks pad the batches of clients with few rows."""
    whole, parts = (run(counted(local, block=block)) for local in ({"batch": 12}, {"batch": 1, "accumulate": 12}))
    assert apart(whole.model, parts.model) < TOLERANCE["float64"]
    assert whole.rows[-1]["train/loss"] == pytest.approx(parts.rows[-1]["train/loss"], rel=1e-12)


def test_what_a_row_counts_is_how_often_it_is_there():
    """Equal weights change nothing, and weights of 0 take rows out of the mean."""
    alike = type("Alike", (Counted,), {"row_weights": lambda self, batch: torch.full_like(batch["count"], 3)})
    unweighted = type("Unweighted", (Counted,), {"row_weights": lambda self, batch: None})
    first, second = (run(counted({"batch": 12}, kind)) for kind in (alike, unweighted))
    assert apart(first.model, second.model) < TOLERANCE["float64"]
    assert apart(first.model, run(counted({"batch": 12})).model) > 1e-4


def test_evaluations_are_means_over_weights():
    """On the test set, and on the rows that each client holds out."""
    result = run(counted({"batch": 12}))
    workload = result.experiment.workload
    split = workload.split(result.experiment.seed, 30)
    rows = {name: torch.from_numpy(np.ascontiguousarray(column)) for name, column in split.test.items()}
    report = workload.report({name: value for name, value in result.model.items()}, rows)
    for name, values in report.items():
        mean = (values * rows["count"]).sum() / rows["count"].sum()
        assert result.rows[-1][f"eval/{name}"] == pytest.approx(float(mean), rel=1e-12)
    index, losses = split.client_index, []
    train = {name: torch.from_numpy(np.ascontiguousarray(column)) for name, column in split.train.items()}
    for client in range(30):
        own = index.rows[index.offsets[client] : index.offsets[client + 1]]
        own = torch.from_numpy(own[split.train[HELD_OUT][own]])
        if len(own):
            columns = {name: column[own] for name, column in train.items()}
            loss, counts = workload.report(dict(result.model), columns)["loss"], columns["count"]
            losses.append(float((loss * counts).sum() / counts.sum().clamp(min=1)))
    assert result.rows[-1]["eval/clients/test_loss"] == pytest.approx(np.mean(losses), rel=1e-12)


def test_weights_are_one_number_for_each_row():
    wrong = type("Wrong", (Counted,), {"row_weights": lambda self, batch: batch["count"].sum()})
    with pytest.raises(ConfigError, match=r"row_weights must return one number per example, \(8,\) .*, got \(\)"):
        run(counted({"batch": 12}, wrong))

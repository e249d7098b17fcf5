"""Power-of-choice asks clients for F_i(x), the mean of the losses that they train on, whatever the workload reports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from pyarrow import parquet
from torch import nn

from fedfleet.engine.api import run
from fedfleet.engine.config.schema import experiment
from fedfleet.workloads.data.digits import Digits
from fedfleet.workloads.models.convolutional import Dropout
from fedfleet.workloads.models.norms import BatchNorm
from fedfleet.workloads.models.small import Logistic
from fedfleet.workloads.partitions.standard import Shards
from fedfleet.workloads.workload import Batch, Model, Params

torch.set_num_threads(1)

CLIENTS, COHORT = 12, 4


@dataclass(frozen=True)
class Own(Digits):
    """Its losses have another order of the clients than the loss that it reports: they are the squared distances of the
    logits from 0."""

    model: Model = Logistic()
    partition: Any = Shards(1)

    def losses(self, p: Params, batch: Batch) -> torch.Tensor:
        assert batch["key"].dtype == torch.int64  # as in training
        return self.logits(p, batch, batch["key"]).square().sum(-1)


@dataclass(frozen=True)
class Unreported(Own):
    """It reports no loss at all."""

    def report(self, p: Params, batch: Batch) -> dict[str, torch.Tensor]:
        return {"accuracy": super().report(p, batch)["accuracy"]}


@dataclass(frozen=True)
class Normalised(Model):
    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 6), BatchNorm(6), Dropout(0.5), nn.Linear(6, classes))


@dataclass(frozen=True)
class WithStatistics(Digits):
    """Modules are in evaluation mode when a loss is asked for: the running statistics normalise, and do not move, and
    nothing is dropped."""

    model: Model = Normalised()
    partition: Any = Shards(1)


def drawn(workload: Any, tmp_path: Any, loss: str = "all") -> list[int]:
    """The clients of round 1 among all of them."""
    federation = {
        "clients": CLIENTS, "cohort": COHORT, "rounds": 1, "local": {"steps": 1, "batch": 8},
        "sampler": {"name": "power_of_choice", "d": CLIENTS, "candidates": "uniform", "loss": loss, "rows": 10_000},
    }  # fmt: skip
    made = {"workload": workload, "method": "fedavg", "federation": federation, "engine": {"backend": "local"}}
    run(experiment({**made, "tracking": {"uri": "none", "clients": True}, "evaluate": {"every": 0}}), tmp_path / "run")
    return sorted(parquet.read_table(tmp_path / "run" / "clients")["id"].to_pylist())


def largest(workload: Any) -> list[int]:
    """The clients with the largest mean losses at the first model, one after another, by plain torch."""
    split, model = workload.split(0, CLIENTS), {n: v.float() for n, v in workload.init(0).items()}
    index, found = split.client_index, []
    for i in range(CLIENTS):
        rows = index.rows[index.offsets[i] : index.offsets[i + 1]]
        batch = {name: torch.from_numpy(np.asarray(column)[rows]) for name, column in split.train.items()}
        module = workload.build().eval()
        module.load_state_dict(model)
        logits = module(workload.inputs(batch, torch.float32))
        if isinstance(workload, Own):
            losses = logits.square().sum(-1)
        else:
            losses = nn.functional.cross_entropy(logits, batch["label"].long(), reduction="none")
        found.append(losses.double().mean().item())
    assert len(set(found)) == CLIENTS
    return sorted(np.argsort(found)[-COHORT:].tolist())


@pytest.mark.parametrize("loss", ["all", "batch"])
@pytest.mark.parametrize("workload", [Own(), Unreported(), WithStatistics()], ids=lambda each: type(each).__name__)
def test_clients_with_the_largest_training_losses_are_taken(workload: Any, loss: str, tmp_path: Any):
    assert drawn(workload, tmp_path, loss) == largest(workload)


def test_a_workload_whose_report_is_for_its_own_test_row(tmp_path: Any):
    """The report of `quadratic` reads columns that training rows do not have."""
    workload = {"name": "quadratic", "dim": 3}
    assert len(drawn(workload, tmp_path)) == COHORT

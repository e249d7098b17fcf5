"""A worker reads only the rows of the clients that it runs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree

from fedfleet.engine.clients.worker import Data, Worker
from fedfleet.engine.cohorts.tasks import Broadcast, TrainingTask, plan_tasks
from fedfleet.engine.run_spec import RunSpec
from fedfleet.engine.runs.prepare import prepare
from fedfleet.engine.state.row_files import StateLayout

from .setups import EPOCHS, STEPS, digits


def task_of(run_spec: RunSpec, data: Data, clients: np.ndarray) -> TrainingTask:
    plan = run_spec.experiment.federation
    tasks = plan_tasks(clients, data.client_index.sizes[clients], plan.local, len(clients))
    none = np.full(len(clients), -1)
    return TrainingTask(tasks[0], 1, False, np.zeros(len(clients), dtype=np.int64), np.ones(len(clients)), *[none] * 3)


@pytest.mark.parametrize("local", [STEPS, EPOCHS], ids=["steps", "epochs"])
@pytest.mark.parametrize("block", [1, 4])
def test_other_clients_rows_may_be_anything(local, block):
    """The rows of all other clients are overwritten by NaN, and not a bit of the result changes."""
    run_spec = prepare(digits("fedavg", local, block=block), "test")
    split = run_spec.split()
    clients = np.array([3, 8, 11, 20])
    own = np.concatenate(
        [split.client_index.rows[split.client_index.offsets[c] : split.client_index.offsets[c + 1]] for c in clients]
    )
    poisoned = {name: column.copy() for name, column in split.train.items()}
    others = np.setdiff1d(np.arange(len(split.train["label"])), own)
    poisoned["input"][others] = np.nan
    assert len(others) > len(own) > 0
    sums = []
    for train in (split.train, poisoned):
        data = Data.of(train, split.test, split.client_index)
        worker = Worker(run_spec, data, StateLayout("", 0, bfloat16=False, digests=False), lambda: None)
        leaves = [leaf.numpy() for leaf in pytree.tree_leaves(worker.state_spec.server.public)]
        sums.append(worker.train(task_of(run_spec, data, clients), Broadcast(1, leaves)))
    assert all(np.array_equal(a, b) for a, b in zip(sums[0].leaves, sums[1].leaves, strict=True))
    assert np.isfinite(sums[1].leaves[0]).all()
    assert sums[0].facts["loss"] == sums[1].facts["loss"]
    assert torch.isfinite(torch.tensor(sums[1].facts["loss"]))

"""Runs pfl-research on a work of the benchmarks, with two processes under torchrun, which is its way to use two cores.

    pip install "pfl[pytorch]==0.6.0"
    fedfleet bench w1 --peer "pfl=python benchmarks/peer_pfl.py --work {work} --rounds {rounds}"

It prints one JSON line, the clients per second of every timed round. Its rounds have the same clients, batches and
steps as those of `fedfleet bench`, a plain average, and no evaluation.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import subprocess
import sys
import time
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from fedfleet.tune.bench.works import FEDERATIONS, WORKLOADS

LR, WARMUP = 0.05, 2


class Net(torch.nn.Module):
    """A model in the form that pfl needs."""

    def __init__(self, net: torch.nn.Module) -> None:
        super().__init__()
        self.net = net

    def loss(self, x: torch.Tensor, y: torch.Tensor, is_eval: bool = False) -> torch.Tensor:
        return F.cross_entropy(self.net(x), y)

    def metrics(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
        return {}


def play(asked: argparse.Namespace) -> None:
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam import NNTrainHyperParams
    from pfl.internal.ops.selector import get_framework_module
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel

    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    np.random.seed(0)
    plan, workload = FEDERATIONS[asked.work], WORKLOADS[asked.work]()
    train, each = workload.load()[0], plan["local"]["steps"] * plan["local"]["batch"]
    inputs, labels = (torch.from_numpy(train[name]).unflatten(0, (-1, each)) for name in ("input", "label"))
    net = Net(workload.model.build(workload.shape, workload.classes))
    seconds = []

    def dataset(client: int) -> Any:
        order = torch.randperm(each)  # pfl's data sets batch without shuffling
        return Dataset(raw_data=[inputs[client][order], labels[client][order]], user_id=str(client))

    class Clock(TrainingProcessCallback):
        def on_train_begin(self, *, model: Any) -> Any:
            seconds.append(time.perf_counter())
            return Metrics()

        def after_central_iteration(self, metrics: Any, model: Any, *, central_iteration: int) -> Any:
            seconds.append(time.perf_counter())
            return False, Metrics()

    class Unevaluated(FederatedAveraging):
        def get_next_central_contexts(self, *args: Any, **more: Any) -> Any:
            contexts, *others = super().get_next_central_contexts(*args, **more)
            return contexts and tuple(dataclasses.replace(c, do_evaluation=False) for c in contexts), *others

    sampler = get_user_sampler("random", list(range(plan["clients"])))
    data = FederatedDataset(dataset, sampler)
    made = PyTorchModel(
        model=net, local_optimizer_create=torch.optim.SGD, central_optimizer=torch.optim.SGD(net.parameters(), 1.0)
    )
    Unevaluated().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=WARMUP + asked.rounds,
            evaluation_frequency=10**9,
            train_cohort_size=plan["cohort"],
            val_cohort_size=0,
        ),
        backend=SimulatedBackend(training_data=data, val_data=data),
        model=made,
        model_train_params=NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=LR, local_batch_size=plan["local"]["batch"]
        ),
        callbacks=[Clock()],
        send_metrics_to_platform=False,
    )
    if get_framework_module().distributed.global_rank == 0:
        speeds = plan["cohort"] / np.diff(seconds)[WARMUP:]
        print(json.dumps({"clients_per_s": speeds.tolist()}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--work", choices=list(FEDERATIONS), default="w1")
    parser.add_argument("--rounds", type=int, default=10)
    asked = parser.parse_args()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return play(asked)
    os.environ |= {"OMP_NUM_THREADS": "1", "PFL_PYTORCH_DEVICE": "cpu"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", *sys.argv]
    return sys.exit(subprocess.call(command))


if __name__ == "__main__":
    main()

"""Measures the processor time of a client's LoRA steps on a small GPT, relative to a plain loop with the package peft.

    python benchmarks/adapters.py [--pairs 7] [--block 1 8] [--width 128] [--kernels torch attention]

Both run in this process on one thread, in turn: one round of a cohort by a worker of the engine (drawing and gathering
batches, local steps, sums), and the same number of clients by a plain loop of PyTorch, whose network peft has adapted.
Both take steps of AdamW on the factors of the projections of queries and values. The figure is the plain loop's
processor time for a client divided by the engine's with each kind of kernels, the median of the turns (least … most).
It needs peft.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import peft  # pyright: ignore[reportMissingImports]
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from fedfleet.engine.clients.worker import Data, Worker, keep_freed_memory
from fedfleet.engine.cohorts.tasks import Broadcast
from fedfleet.engine.config.schema import Experiment, experiment
from fedfleet.engine.planning.autotune import STEPS, first_clients, short_run
from fedfleet.engine.run_spec import ExecutionPlan, RunSpec
from fedfleet.engine.state.row_files import StateLayout
from fedfleet.workloads.models.gpt import Gpt

BATCH, LENGTH, RANK, ALPHA, LR = 8, 64, 8, 16, 1e-3
WORDS = "a client has rows of its own and the server has the mean of what the clients send in a round "


def plain_network(width: int, vocabulary: int) -> nn.Module:
    """The network with peft's adapters."""
    config = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=["q", "v"])
    return peft.get_peft_model(Gpt(width, 2, 4).build((LENGTH,), vocabulary), config)  # pyright: ignore


def train_plainly(network: nn.Module, columns: dict[str, torch.Tensor], start: list[torch.Tensor]) -> None:
    """One client: it begins at `start`, takes local steps, and finds how far it has come."""
    trained = [value for value in network.parameters() if value.requires_grad]
    with torch.no_grad():
        for value, begin in zip(trained, start, strict=True):
            value.copy_(begin)
    optimiser = torch.optim.AdamW(trained, lr=LR)
    for _ in range(STEPS):
        rows = torch.randint(len(columns["input"]), (BATCH,))
        logits = network(columns["input"][rows].long())
        loss = F.cross_entropy(logits.flatten(0, 1), columns["label"][rows].flatten().long())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    with torch.no_grad():
        _ = [value - begin for value, begin in zip(trained, start, strict=True)]


class Engine(NamedTuple):
    """What takes one task of the engine: some clients in blocks."""

    worker: Worker
    task: Any
    shared: Broadcast

    @property
    def clients(self) -> int:
        return len(self.task.task.clients)

    @staticmethod
    def of(run_spec: RunSpec, data: Data, plan: ExecutionPlan) -> Engine:
        trial = short_run(run_spec, data, plan)
        algorithm = trial.method()
        with torch.no_grad():
            public = algorithm.broadcast(algorithm.server_init(trial.initial_model()))
        worker = Worker(trial, data, StateLayout("", 0, False, False), lambda: None)
        shared = Broadcast(1, [value.numpy() for value in pytree.tree_leaves(public)])
        return Engine(worker, first_clients(trial, data, plan.block), shared)


def experiment_with(block: int, width: int, kernels: str, path: Path) -> Experiment:
    return experiment(
        {
            "workload": {
                "name": "characters",
                "path": str(path),
                "length": LENGTH,
                "model": {"name": "gpt", "width": width, "depth": 2, "heads": 4},
                "adapter": {"name": "lora", "targets": ["*.q", "*.v"], "rank": RANK, "alpha": ALPHA},
            },
            "method": {"name": "fedavg", "rule": {"name": "adamw", "lr": LR}},
            "federation": {"clients": 8, "cohort": 8, "rounds": 1, "local": {"steps": STEPS, "batch": BATCH}},
            "engine": {"backend": "local", "block": block, "kernels": kernels},
            "evaluate": {"every": 0},
            "tracking": {"uri": "none"},
        }
    )


def seconds_per_client(began: float, clients: int) -> float:
    """Of the processor, since a time."""
    return (time.process_time() - began) / clients


def turns(block: int, width: int, kinds: list[str], count: int, folder: Path) -> list[list[float]]:
    """Processor seconds per client of the plain loop, and of the engine with each kind of kernels, in each of `count`
    turns, after one that does not count."""
    path = folder / "text.txt"
    path.write_text(WORDS * 500)
    run_specs = [RunSpec.of("adapters", experiment_with(block, width, kernels, path)) for kernels in kinds]
    split = run_specs[0].split()
    data = Data.of(split.train, split.test, split.client_index)
    engines = [
        Engine.of(spec, data, ExecutionPlan(block, kernels)) for spec, kernels in zip(run_specs, kinds, strict=True)
    ]
    columns = {name: torch.from_numpy(column) for name, column in split.train.items()}
    network = plain_network(width, run_specs[0].workload.classes)  # pyright: ignore
    start = [value.detach().clone() for value in network.parameters() if value.requires_grad]
    found = []
    for _ in range(count + 1):
        began = time.process_time()
        for _ in range(engines[0].clients):
            train_plainly(network, columns, start)
        found.append([seconds_per_client(began, engines[0].clients)])
        for engine in engines:
            began = time.process_time()
            engine.worker.train(engine.task, engine.shared)
            found[-1].append(seconds_per_client(began, engine.clients))
    return found[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--block", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--kernels", nargs="+", default=["torch"], help="of the engine, as in engine.kernels")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    for block in asked.block:
        with tempfile.TemporaryDirectory() as folder:
            plain, *of_kinds = zip(*turns(block, asked.width, asked.kernels, asked.pairs, Path(folder)), strict=True)
        for kernels, ours in zip(asked.kernels, of_kinds, strict=True):
            ratios = [theirs / own for theirs, own in zip(plain, ours, strict=True)]
            print(
                f"width {asked.width}, blocks of {block}, kernels {kernels}: "
                f"{median(ratios):.2f} ({min(ratios):.2f} … {max(ratios):.2f}) of plain PyTorch with peft "
                f"{peft.__version__}, {1e3 * median(ours) / STEPS:.2f} ms per step of a client",
                flush=True,
            )


if __name__ == "__main__":
    main()

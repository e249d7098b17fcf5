"""Measures the processor time of a client alone by torch's kernels, relative to plain PyTorch with fused layers.

    python benchmarks/alone.py [w1 w2 w4 …] [--pairs 7] [--kernels torch] [--method fedavg]

Both run in this process on one thread, in turn: one round of a cohort by a worker of the engine (drawing and gathering
batches, local steps, sums), and the same clients by the plain loop of `fedfleet bench`. The figure is the plain loop's
processor time divided by the engine's, the median of the pairs (least … most).
"""

from __future__ import annotations

import argparse
import time
from statistics import median

import torch
from torch.utils import _pytree as pytree

from fedfleet.engine.clients.worker import Data, Worker, keep_freed_memory
from fedfleet.engine.cohorts.tasks import Broadcast
from fedfleet.engine.config.schema import experiment
from fedfleet.engine.planning.autotune import first_clients, short_run
from fedfleet.engine.run_spec import ExecutionPlan, RunSpec
from fedfleet.engine.state.row_files import StateLayout
from fedfleet.tune.bench.measure import METHODS
from fedfleet.tune.bench.plain_loop import PlainClient
from fedfleet.tune.bench.works import FEDERATIONS


def pairs(work: str, method: str, kernels: str, block: int, count: int) -> list[tuple[float, float]]:
    """(plain, engine): processor seconds per client in each of `count` pairs, after one pair that does not count."""
    made = experiment(
        {
            "plugins": ["fedfleet.tune.bench.works"],
            "workload": work,
            "method": METHODS[method],
            "federation": {**FEDERATIONS[work], "rounds": 1},
            "engine": {"backend": "local", "block": block, "kernels": kernels},
            "evaluate": {"every": 0},
            "tracking": {"uri": "none"},
        }
    )
    run_spec = RunSpec.of("alone", made)
    split = run_spec.split()
    data = Data.of(split.train, split.test, split.client_index)
    trial = short_run(run_spec, data, ExecutionPlan(block, kernels))
    algorithm = trial.method()
    with torch.no_grad():
        public = algorithm.broadcast(algorithm.server_init(trial.initial_model()))
    worker = Worker(trial, data, StateLayout("", 0, False, False), lambda: None)
    task, shared = first_clients(trial, data, block), Broadcast(1, [v.numpy() for v in pytree.tree_leaves(public)])
    x, plain = trial.initial_model().flat, PlainClient(work, split.train)
    total, found = torch.zeros_like(x), []
    for _ in range(count + 1):
        began = time.process_time()
        optimiser = plain.optimiser()
        with torch.enable_grad():
            for client in task.task.clients.tolist():
                plain.train(client, x, total, optimiser)
        middle = time.process_time()
        worker.train(task, shared)
        ended, clients = time.process_time(), len(task.task.clients)
        found.append(((middle - began) / clients, (ended - middle) / clients))
    return found[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("works", nargs="*", default=["w1", "w2", "w4", "w5", "w6", "w7", "w8"])
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--kernels", default="torch")
    parser.add_argument("--block", type=int, default=1)
    parser.add_argument("--method", choices=list(METHODS), default="fedavg")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    for work in asked.works:
        found = pairs(work, asked.method, asked.kernels, asked.block, asked.pairs)
        ratios = [plain / ours for plain, ours in found]
        ours = 1e3 * median(ours for _, ours in found)
        print(
            f"{work} {asked.method}, blocks of {asked.block}, {asked.kernels}: {median(ratios):.2f} "
            f"({min(ratios):.2f} … {max(ratios):.2f}) of plain PyTorch, {ours:.2f} ms per client",
            flush=True,
        )


if __name__ == "__main__":
    main()

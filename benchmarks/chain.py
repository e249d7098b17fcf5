"""Measures a gradient by the fused chain against batch size, for the networks of `fedfleet bench` that are chains.

    python benchmarks/chain.py [w1 w2 w3] [--batches 10 16 32 50 64]

The figures are processor time on one thread, the least of many calls in turn: milliseconds for one client's gradient
and microseconds for an example, by the chain and by torch's kernels with autograd.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch

from fedfleet.algorithms.fedavg import fedavg
from fedfleet.algorithms.tree import Tree
from fedfleet.engine.clients.local_training import Gradient, LocalTrainer
from fedfleet.engine.kernels.fused_chain import FusedChain
from fedfleet.engine.kernels.torchs import Torch
from fedfleet.tune.bench.works import WORKLOADS

KERNELS = {"chain": FusedChain(), "torch": Torch()}


def least(call: Callable[[], object], seconds: float) -> float:
    """The least processor seconds of a call, repeated for so many seconds and three times at least."""
    times: list[float] = []
    while sum(times) < seconds or len(times) < 3:
        began = time.process_time()
        call()
        times.append(time.process_time() - began)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("works", nargs="*", default=["w1", "w2", "w3"])
    parser.add_argument("--batches", type=int, nargs="+", default=[10, 16, 32, 50, 64])
    asked = parser.parse_args()
    torch.set_num_threads(1)
    for work in asked.works:
        workload = WORKLOADS[work]()
        x = Tree.of(workload.init(0))
        method: Any = fedavg()
        trainers = {name: LocalTrainer(method, workload, x, kernels) for name, kernels in KERNELS.items()}
        for size in asked.batches:
            draw = torch.Generator().manual_seed(0)
            batch = {
                "input": torch.randn(size, *workload.shape, generator=draw),
                "label": torch.randint(workload.classes, (size,), generator=draw),
                "key": torch.zeros((), dtype=torch.int64),
            }
            found = [
                least(lambda: Gradient.forward(x.flat, trainer, x.layout, tuple(batch), *batch.values()), 1.0)  # noqa: B023
                for trainer in trainers.values()
            ]
            shown = "; ".join(
                f"{name} {1e3 * each:.2f} ms, {1e6 * each / size:.1f} us an example"
                for name, each in zip(trainers, found, strict=True)
            )
            print(f"{work}, batches of {size}: {shown}; {found[1] / found[0]:.2f} times as fast", flush=True)


if __name__ == "__main__":
    main()

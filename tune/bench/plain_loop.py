"""The plain loop: two processes of one thread each train one client at a time in plain PyTorch, without a framework.

    python -m fedfleet.tune.bench.plain_loop --work w1

Each process holds one model. For a client it copies the global weights into the model, takes K steps of SGD and adds
the result to a running sum. The sums of both processes lie in shared memory. The program prints one JSON line with the
clients per second of every timed round.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import torch
import torch.multiprocessing as mp
from torch.nn import functional as F

from ...workloads.workload import Columns
from .fused import fused, state_of
from .works import FEDERATIONS, WORKLOADS

LR = 0.05


class PlainClient:
    """The local training of one client after another in plain PyTorch, with torch's fused layers where there are any.

    A client copies the global weights into the one model, takes K steps of SGD, and adds the result to a running sum.
    """

    def __init__(self, work: str, train: Columns) -> None:
        """work: a key of FEDERATIONS. train: the columns of its training rows."""
        workload, plan = WORKLOADS[work](), FEDERATIONS[work]
        self.steps, self.batch = plan["local"]["steps"], plan["local"]["batch"]
        self.inputs, self.labels = torch.from_numpy(train["input"]), torch.from_numpy(train["label"])
        self.model = fused(workload.model.build(workload.shape, workload.classes)).train()
        self.state = state_of(self.model)
        self.sizes = [value.numel() for value in self.state]

    def optimiser(self) -> torch.optim.SGD:
        return torch.optim.SGD(self.model.parameters(), lr=LR)

    def train(self, client: int, x: torch.Tensor, total: torch.Tensor, optimiser: torch.optim.SGD) -> None:
        """x: the global weights (P,). total: the running sum (P,)."""
        with torch.no_grad():
            for mine, value in zip(self.state, x.split(self.sizes), strict=True):
                mine.copy_(value.view_as(mine))
        order = torch.randperm(self.steps * self.batch) + client * self.steps * self.batch
        for k in range(self.steps):
            rows = order[k * self.batch : (k + 1) * self.batch]
            optimiser.zero_grad(set_to_none=True)
            F.cross_entropy(self.model(self.inputs[rows]), self.labels[rows]).backward()
            optimiser.step()
        with torch.no_grad():
            for mine, value in zip(self.state, total.split(self.sizes), strict=True):
                value.add_(mine.reshape(-1))


def loop(rank: int, work: str, shared: dict[str, torch.Tensor], go: Any, back: Any) -> None:
    """One process. shared: weights `x`, and for each process its sum and its clients; a client -1 ends the process.
    go, back: barriers at the beginning and the end of a round."""
    torch.set_num_threads(1)
    plain = PlainClient(work, WORKLOADS[work]().load()[0])
    back.wait()
    while True:
        go.wait()
        clients = shared["clients"][rank]
        if clients[0] < 0:
            return
        total = shared["sums"][rank].zero_()
        optimiser = plain.optimiser()
        for client in clients.tolist():
            plain.train(client, shared["x"], total, optimiser)
        back.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--work", choices=list(WORKLOADS), default="w1")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=2)
    asked = parser.parse_args()
    plan, workload = FEDERATIONS[asked.work], WORKLOADS[asked.work]()
    cohort = plan["cohort"]
    x = torch.cat([t.reshape(-1) for t in workload.init(0).values()])
    shared = {
        "x": x.share_memory_(),
        "sums": torch.zeros(2, len(x)).share_memory_(),
        "clients": torch.zeros(2, cohort // 2, dtype=torch.int64).share_memory_(),
    }
    context = mp.get_context("spawn")
    go, back = context.Barrier(3), context.Barrier(3)
    both = [context.Process(target=loop, args=(r, asked.work, shared, go, back), daemon=True) for r in range(2)]
    for process in both:
        process.start()
    back.wait()
    seconds = []
    for _ in range(asked.warmup + asked.rounds):
        started = time.perf_counter()
        shared["clients"].copy_(torch.randperm(plan["clients"])[:cohort].view(2, -1))
        go.wait()
        back.wait()
        shared["x"].copy_(shared["sums"].sum(0) / cohort)
        seconds.append(time.perf_counter() - started)
    shared["clients"].fill_(-1)
    go.wait()
    print(json.dumps({"clients_per_s": [cohort / s for s in seconds[asked.warmup :]]}))


if __name__ == "__main__":
    main()

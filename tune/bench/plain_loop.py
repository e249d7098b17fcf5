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

from .works import FEDERATIONS, WORKLOADS

LR = 0.05


def loop(rank: int, work: str, shared: dict[str, torch.Tensor], go: Any, back: Any) -> None:
    """One process. shared: weights `x`, and for each process its sum and its clients; a client -1 ends the process.
    go, back: barriers at the beginning and the end of a round."""
    torch.set_num_threads(1)
    workload, plan = WORKLOADS[work](), FEDERATIONS[work]
    steps, batch = plan["local"]["steps"], plan["local"]["batch"]
    train = workload.load()[0]
    inputs, labels = torch.from_numpy(train["input"]), torch.from_numpy(train["label"])
    model = workload.model.build(workload.shape, workload.classes)
    parameters = list(model.parameters())
    sizes = [p.numel() for p in parameters]
    back.wait()
    while True:
        go.wait()
        clients = shared["clients"][rank]
        if clients[0] < 0:
            return
        total = shared["sums"][rank].zero_()
        optimiser = torch.optim.SGD(parameters, lr=LR)
        for client in clients.tolist():
            with torch.no_grad():
                for p, value in zip(parameters, shared["x"].split(sizes), strict=True):
                    p.copy_(value.view_as(p))
            order = torch.randperm(steps * batch) + client * steps * batch
            for k in range(steps):
                rows = order[k * batch : (k + 1) * batch]
                optimiser.zero_grad(set_to_none=True)
                F.cross_entropy(model(inputs[rows]), labels[rows]).backward()
                optimiser.step()
            with torch.no_grad():
                for p, value in zip(parameters, total.split(sizes), strict=True):
                    value.add_(p.reshape(-1))
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

"""Says how much faster than plain PyTorch a local step could be at best, from what its products cost.

    python benchmarks/roofline.py [w4 w6 …] [--steps 10]

A step of the plain loop of `fedfleet bench` (forward, backward, SGD) is profiled on one thread, with images stored
plane by plane and with their channels last. Its time consists of products (convolutions and matrix products) and of
everything else: normalisation, activation, pooling, copies. The speed of this processor is that of a product of two
matrices 1024 x 1024, measured before and after. Two bounds follow for any other way to compute the same step:

    products at that speed   the products of the step, counted by torch, at the speed of the matrix product; all else
                             for nothing
    all else for nothing     the products as torch computes them here
"""

from __future__ import annotations

import argparse
import time

import torch
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from fedfleet.engine.clients.worker import keep_freed_memory
from fedfleet.tune.bench.fused import fused
from fedfleet.tune.bench.works import FEDERATIONS, WORKLOADS

PRODUCTS = ("convolution", "addmm", "mm", "bmm", "baddbmm")
"""What the names of torch's products contain or are."""


def speed() -> float:
    """Floating point operations per second of a product of matrices, the best of 20."""
    a, b = torch.randn(2, 1024, 1024)
    return 2 * 1024**3 / min(seconds_of(lambda: a @ b) for _ in range(20))


def seconds_of(f) -> float:
    began = time.process_time()
    f()
    return time.process_time() - began


def is_product(name: str) -> bool:
    operation = name.removeprefix("aten::")
    return name.startswith("aten::") and ("convolution" in operation or operation in PRODUCTS)


def measure(work: str, steps: int, last: bool) -> tuple[float, float, float]:
    """(seconds of a step, seconds of its products, its floating point operations). last: channels last."""
    workload, batch = WORKLOADS[work](), FEDERATIONS[work]["local"]["batch"]
    model = fused(workload.model.build(workload.shape, workload.classes)).train()
    x, label = torch.randn(batch, *workload.shape), torch.randint(0, workload.classes, (batch,))
    if last:
        model, x = model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        optimiser.zero_grad(set_to_none=True)
        F.cross_entropy(model(x), label).backward()
        optimiser.step()

    step()
    with FlopCounterMode(display=False) as counter:
        step()
    whole = sorted(seconds_of(step) for _ in range(steps))[steps // 2]
    with profile(activities=[ProfilerActivity.CPU]) as found:
        for _ in range(steps):
            step()
    each = found.key_averages()
    share = sum(e.self_cpu_time_total for e in each if is_product(e.key)) / sum(e.self_cpu_time_total for e in each)
    return whole, share * whole, float(counter.get_total_flops())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("works", nargs="*", default=["w4", "w6"])
    parser.add_argument("--steps", type=int, default=10)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    for work in asked.works:
        before = speed()
        found = {last: measure(work, asked.steps, last) for last in (False, True)}
        best = max(before, speed())
        plain = found[False][0]
        for last, (whole, products, operations) in found.items():
            layout = "last" if last else "first"
            print(
                f"{work}, channels {layout}: {1e3 * whole:.1f} ms a step, {plain / whole:.2f} of the plain step; "
                f"products {1e3 * products:.1f} ms at {operations / products / 1e9:.0f} GFLOP/s"
            )
        least, products = found[True][2] / best, min(each[1] for each in found.values())
        print(
            f"{work}: at {best / 1e9:.0f} GFLOP/s, the speed of a matrix product, products alone would be "
            f"{plain / least:.2f} of the plain step; all else for nothing, {plain / products:.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()

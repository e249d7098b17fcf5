"""Measures the compiled kernels and those of torch, layer by layer, on one thread.

    python benchmarks/kernels.py

The figures are microseconds per client for forward and backward pass together. They are the least of many passes in
turn, because other work on the machine affects the least time least.
"""

from __future__ import annotations

import argparse
import time
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.func import vmap
from torch.nn import functional as F

from fedfleet.engine.clients.worker import keep_freed_memory
from fedfleet.engine.kernels.operators import Native

LAYERS = {  # layers of w1 and w3 in `fedfleet bench`: inputs, outputs, side, padding, height and width, examples
    "w1 conv1": (1, 6, 5, 2, 28, 10),
    "w1 conv2": (6, 16, 5, 0, 14, 10),
    "w3 conv1": (1, 32, 3, 0, 28, 20),
    "w3 conv2": (32, 64, 3, 0, 26, 20),
}


def passes(clients: int) -> dict[str, tuple]:
    """name -> (function of one client, its tensors with the axis of clients first, whether the gradient with respect to
    the first tensor is needed)."""
    made = {}
    for name, (inputs, outputs, side, padding, size, examples) in LAYERS.items():
        x, weight, bias = (
            torch.randn(clients, *shape)
            for shape in ((examples, inputs, size, size), (outputs, inputs, side, side), (outputs,))
        )
        made[name] = (lambda x, w, b, p=padding: F.conv2d(x, w, b, padding=p), (x, weight, bias), inputs > 1)
    return made


def once(f, tensors: tuple[Tensor, ...], first: bool, which: str) -> float:
    """Seconds of one forward and backward pass. first: whether the gradient of the first tensor is needed. which: the
    kernels."""
    leaves = [t.detach().requires_grad_(first or i > 0) for i, t in enumerate(tensors)]
    began = time.perf_counter()
    with Native().around_losses() if which == "native" else nullcontext():
        y = f(*(leaf[0] for leaf in leaves)) if len(tensors[0]) == 1 else vmap(f)(*leaves)
    torch.autograd.grad(y, [leaf for leaf in leaves if leaf.requires_grad], y.detach())
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--blocks", type=int, nargs="+", default=[1, 9])
    parser.add_argument("--passes", type=int, default=100)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    for clients in asked.blocks:
        for name, (f, tensors, first) in passes(clients).items():
            least = dict.fromkeys(("torch", "native"), float("inf"))
            for number in range(max(5, asked.passes // clients)):
                for which in least:
                    took = once(f, tensors, first, which)
                    least[which] = min(least[which], took) if number else float("inf")
            line = "  ".join(f"{which} {1e6 * seconds / clients:8.1f}" for which, seconds in least.items())
            print(f"block {clients}  {name:9} us per client  {line}", flush=True)


if __name__ == "__main__":
    main()

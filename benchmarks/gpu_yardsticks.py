"""Yardsticks of benchmarks/gpu.py: the same works without this package, on the same device, in the same run.

plain loop        one client after another, as a user writes it; cuDNN chooses its kernels
torch.func.vmap   the cohort at once, by torch.func's grad under vmap
JAX vmap          the cohort at once, K steps in one jitted function; for w1 to w3, where JAX is

The two of torch train the network of the work, JAX that of peer_fedjax.py. A client has its own rows as batches, in
a new order in each round; the models are averaged.

    python benchmarks/gpu_yardsticks.py w1 cuda 10 20

measures JAX in a process of its own, because it keeps memory of the card: 10 rounds, at most 20 seconds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

ROOT = Path(__file__).resolve().parents[1]
LR = 0.05
WARM_UP = 2
"""Rounds that are not timed."""
COMPILING = 60.0
"""Seconds that JAX's process may take beside its measurement: it compiles meanwhile."""
JAX_WORKS = ("w1", "w2", "w3")


class Work:
    """The network of a work and the rows of its clients on a device. federation: its sizes."""

    def __init__(self, name: str, federation: dict[str, Any], device: str) -> None:
        from benchmarks.gpu_works import workload_of
        from fedfleet.engine.config.schema import experiment
        from fedfleet.engine.run_spec import RunSpec

        self.clients, self.cohort = federation["clients"], federation["cohort"]
        self.steps, self.batch = federation["local"]["steps"], federation["local"]["batch"]
        self.rows, self.device = self.steps * self.batch, torch.device(device)
        spec = {"plugins": ["benchmarks.gpu_works"], "workload": workload_of(name, self.clients * self.rows)}
        workload: Any = RunSpec.of("yardstick", experiment({**spec, "method": "fedavg"})).workload
        train, _ = workload.load()
        self.inputs, self.labels = (torch.from_numpy(train[key]).to(self.device) for key in ("input", "label"))
        torch.manual_seed(0)
        self.model = workload.model.build(workload.shape, workload.classes).to(self.device).train()
        self.names = [key for key, _ in self.model.named_parameters()]
        self.mine = list(self.model.parameters())
        self.x = [tensor.detach().clone() for tensor in self.mine]

    def sampled(self, number: int) -> np.ndarray:
        """(S,) the clients of a round."""
        return np.random.default_rng(1000 + number).choice(self.clients, self.cohort, replace=False)

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@contextmanager
def as_users_do() -> Iterator[None]:
    """A context with cuDNN's choice of kernels by measurement, and without TF32."""
    cudnn: Any = torch.backends.cudnn
    products: Any = torch.backends.cuda.matmul
    before = cudnn.benchmark, cudnn.allow_tf32, products.allow_tf32
    cudnn.benchmark, cudnn.allow_tf32, products.allow_tf32 = True, False, False
    try:
        yield
    finally:
        cudnn.benchmark, cudnn.allow_tf32, products.allow_tf32 = before


def plain_loop(work: Work, number: int, until: float) -> int:
    """A round, one client after another, as far as it comes. Returns the number of clients that were trained."""
    total, optimiser = [torch.zeros_like(x) for x in work.x], torch.optim.SGD(work.mine, lr=LR)
    for count, client in enumerate(work.sampled(number).tolist()):
        if count and time.perf_counter() > until:
            return count
        with torch.no_grad():
            for mine, x in zip(work.mine, work.x, strict=True):
                mine.copy_(x)
        order = torch.randperm(work.rows, device=work.device) + client * work.rows
        for places in order.split(work.batch):
            optimiser.zero_grad(set_to_none=True)
            F.cross_entropy(work.model(work.inputs[places]), work.labels[places]).backward()
            optimiser.step()
        with torch.no_grad():
            for each, mine in zip(total, work.mine, strict=True):
                each.add_(mine)
    work.x = [each / work.cohort for each in total]
    return work.cohort


def at_once(work: Work, number: int, until: float) -> int:
    """A round, the cohort at once."""

    def loss(p: tuple[Tensor, ...], inputs: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(work.model, dict(zip(work.names, p, strict=True)), (inputs,)), labels)

    clients = torch.from_numpy(work.sampled(number)).to(work.device)
    order = torch.rand(work.cohort, work.rows, device=work.device).argsort(1) + clients[:, None] * work.rows
    y = tuple(x.expand(work.cohort, *x.shape).clone() for x in work.x)
    with torch.no_grad():
        for places in order.split(work.batch, 1):
            gradients = vmap(grad(loss))(y, work.inputs[places], work.labels[places])
            for mine, gradient in zip(y, gradients, strict=True):
                mine.add_(gradient, alpha=-LR)
    work.x = [each.mean(0) for each in y]
    return work.cohort


def timed(work: Work, run: Callable[[Work, int, float], int], rounds: int, seconds: float) -> dict[str, Any]:
    """Clients per second, the median over rounds. seconds: after which no further round begins, from the first timed
    one on. Rounds to warm up take as long at most, and each trains at least one client."""
    speeds = list[float]()
    with as_users_do():
        for number in range(WARM_UP):
            run(work, number, time.perf_counter() + seconds / WARM_UP)
        work.wait()
        until = time.perf_counter() + seconds
        for number in range(WARM_UP, WARM_UP + rounds):
            start = time.perf_counter()
            count = run(work, number, until)
            work.wait()
            speeds.append(count / (time.perf_counter() - start))
            if time.perf_counter() > until:
                break
    return {"clients_per_s": median(speeds), "rounds": len(speeds)}


TORCHS = {"plain loop": plain_loop, "torch.func.vmap": at_once}


def yardsticks(name: str) -> list[str]:
    """The yardsticks that there are for a work on this machine."""
    return [*TORCHS, *(["JAX vmap"] if name in JAX_WORKS and find_spec("jax") else [])]


def measure(
    name: str, yardstick: str, federation: dict[str, Any], device: str, rounds: int, seconds: float
) -> dict[str, Any]:
    """Clients per second of a yardstick."""
    if yardstick in TORCHS:
        return timed(Work(name, federation, device), TORCHS[yardstick], rounds, seconds)
    env = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "JAX_PLATFORMS": device.partition(":")[0]}
    command = [sys.executable, str(Path(__file__).resolve()), name, device, str(rounds), str(seconds)]
    done = subprocess.run(
        command, env=env, stdout=subprocess.PIPE, text=True, timeout=2 * seconds + COMPILING, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def jax_at_once(name: str, rounds: int, seconds: float) -> dict[str, Any]:
    """The same by JAX."""
    import jax
    import jax.numpy as jnp

    from benchmarks.gpu_works import FEDERATIONS
    from benchmarks.peer_fedjax import initial, loss

    work, each = Work(name, FEDERATIONS[name], "cpu"), jax.tree_util.tree_map
    inputs = jnp.asarray(work.inputs.reshape(work.clients, work.rows, 1, 28, 28).numpy())
    labels = jnp.asarray(work.labels.reshape(work.clients, work.rows).numpy().astype(np.int32))

    def client(x: Any, order: Any, inputs: Any, labels: Any) -> Any:
        for k in range(work.steps):
            places = order[k * work.batch : (k + 1) * work.batch]
            gradient = jax.grad(lambda p: loss(name, p, {"x": inputs[places], "y": labels[places]}))(x)  # noqa: B023
            x = each(lambda value, slope: value - LR * slope, x, gradient)
        return x

    @jax.jit
    def round_of(x: Any, clients: Any, orders: Any) -> Any:
        y = jax.vmap(client, (None, 0, 0, 0))(x, orders, inputs[clients], labels[clients])
        return each(lambda value: value.mean(0), y)

    x, speeds, began = initial(name), list[float](), 0.0
    draw = np.random.default_rng(0)
    for number in range(WARM_UP + rounds):
        start = time.perf_counter()
        if number == WARM_UP:
            began = start
        orders = draw.permuted(np.tile(np.arange(work.rows), (work.cohort, 1)), axis=1)
        x = jax.block_until_ready(round_of(x, work.sampled(number), orders))
        speeds.append(work.cohort / (time.perf_counter() - start))
        if number >= WARM_UP and time.perf_counter() - began > seconds:
            break
    return {"clients_per_s": median(speeds[WARM_UP:]), "rounds": len(speeds) - WARM_UP, "jax": jax.__version__}


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "src")]
    print(json.dumps(jax_at_once(sys.argv[1], int(sys.argv[3]), float(sys.argv[4]))))

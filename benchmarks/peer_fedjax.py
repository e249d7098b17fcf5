"""Runs FedJAX on a work of the benchmarks, with its jit backend and XLA's own threads.

    pip install fedjax==0.0.17 jax==0.10.2 jaxlib==0.10.2
    fedfleet bench w1 --peer "fedjax=python benchmarks/peer_fedjax.py --work {work} --rounds {rounds}"

It prints one JSON line, the clients per second of every timed round. Its rounds have as many clients, batches and steps
as those of `fedfleet bench`, a plain average, and no evaluation. Images have their channels last, as XLA prefers on
processors, and pooling is a maximum over a reshaped array, which has the faster gradient there.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np

from fedfleet.tune.bench.works import FEDERATIONS, WORKLOADS

LR, WARMUP = 0.05, 2
SHAPES = {
    "w1": {"c1": (5, 5, 1, 6), "c2": (5, 5, 6, 16), "f1": (400, 120), "f2": (120, 84), "f3": (84, 10)},
    "w2": {"f1": (784, 200), "f2": (200, 200), "f3": (200, 10)},
    "w3": {"c1": (3, 3, 1, 32), "c2": (3, 3, 32, 64), "f1": (9216, 128), "f2": (128, 62)},
}
"""Work -> the shapes of its weights; a convolution is height x width x channels in x channels out."""

Parameters = dict[str, Any]


def initial(work: str) -> Parameters:
    """Weights and biases, uniform as torch draws them."""
    random, p = np.random.default_rng(0), {}
    for name, shape in SHAPES[work].items():
        bound = 1 / np.sqrt(np.prod(shape[:-1]))
        p[name] = jnp.asarray(random.uniform(-bound, bound, shape).astype(np.float32))
        p[f"{name}_bias"] = jnp.asarray(random.uniform(-bound, bound, shape[-1:]).astype(np.float32))
    return p


def convolution(p: Parameters, name: str, x: Any, padding: Any) -> Any:
    y = jax.lax.conv_general_dilated(x, p[name], (1, 1), padding, dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return jax.nn.relu(y + p[f"{name}_bias"])


def pool(x: Any) -> Any:
    """The maximum of every 2 x 2 square of x, (B, height, width, channels)."""
    batch, height, width, channels = x.shape
    return x.reshape(batch, height // 2, 2, width // 2, 2, channels).max((2, 4))


def logits(work: str, p: Parameters, x: Any) -> Any:
    """(B, classes) of images x, (B, 1, 28, 28)."""
    h = x.reshape(-1, 28, 28, 1)
    if work == "w1":
        h = pool(convolution(p, "c2", pool(convolution(p, "c1", h, [(2, 2), (2, 2)])), "VALID"))
    elif work == "w3":
        h = pool(convolution(p, "c2", convolution(p, "c1", h, "VALID"), "VALID"))
    h = h.reshape(h.shape[0], -1)
    *hidden, last = [name for name in SHAPES[work] if name.startswith("f")]
    for name in hidden:
        h = jax.nn.relu(h @ p[name] + p[f"{name}_bias"])
    return h @ p[last] + p[f"{last}_bias"]


def loss(work: str, p: Parameters, batch: Any) -> Any:
    shares = jax.nn.log_softmax(logits(work, p, batch["x"]))
    return -jnp.take_along_axis(shares, batch["y"][:, None], 1).mean()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--work", choices=list(SHAPES), default="w1")
    parser.add_argument("--rounds", type=int, default=10)
    asked = parser.parse_args()
    if not hasattr(jax, "tree_map"):  # fedjax 0.0.17 calls a name that jax has removed
        jax.tree_map = jax.tree_util.tree_map
    import fedjax
    from fedjax.algorithms import fed_avg

    plan, train = FEDERATIONS[asked.work], WORKLOADS[asked.work]().load()[0]
    each = plan["local"]["steps"] * plan["local"]["batch"]
    images = train["input"].reshape(-1, each, 1, 28, 28)
    labels = train["label"].reshape(-1, each).astype(np.int32)
    clients = {i: {"x": images[i], "y": labels[i]} for i in range(plan["clients"])}
    data = fedjax.InMemoryFederatedData(clients)
    sampler = fedjax.client_samplers.UniformGetClientSampler(data, plan["cohort"], seed=0)
    method = fed_avg.federated_averaging(
        lambda p, batch, rng=None: jax.grad(lambda q: loss(asked.work, q, batch))(p),
        fedjax.optimizers.sgd(LR),
        fedjax.optimizers.sgd(1.0),
        fedjax.ShuffleRepeatBatchHParams(batch_size=plan["local"]["batch"], num_epochs=1, seed=0),
    )
    state, times = method.init(initial(asked.work)), [time.perf_counter()]
    for number in range(WARMUP + asked.rounds):
        sampler.set_round_num(number)
        state, _ = method.apply(state, sampler.sample())
        jax.block_until_ready(state.params)
        times.append(time.perf_counter())
    print(json.dumps({"clients_per_s": (plan["cohort"] / np.diff(times)[WARMUP:]).tolist()}), flush=True)


if __name__ == "__main__":
    main()

"""Methods with a warm start begin with the gradients of F_i over all rows of a client, whatever the batch size is.

The six clients of `test_conformance` have 3 to 19 rows. A batch of 4 divides few of these numbers, so that most passes
end with a short batch; a batch of 32 is all of a client's rows at once. TOLERANCE: float64, sums in another order.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree

from fedfleet.algorithms.table import METHODS
from fedfleet.engine.config.registry import resolve, signature
from fedfleet.engine.rounds.pool import finished
from fedfleet.workloads.stateless import Stateless
from tests.test_conformance import Few, few, spec

from .setups import driver_here, states_of

torch.set_num_threads(1)
TOLERANCE = {"rtol": 1e-11, "atol": 1e-12}
WARM = [
    name
    for name in METHODS
    if "start" in signature(resolve(METHODS[name]))[1]
    and "gradient" in str(signature(resolve(METHODS[name]))[0]["start"])
]
"""The methods that have a warm start."""


def opened(method: str, batch: int, **engine: Any) -> tuple[Any, list[Any]]:
    """(the server's state after the warm start, the states of all clients)."""
    base = few(method, plan={"local": {"steps": 3, "batch": batch}}, engine=engine)
    with driver_here(base.model_copy(update={"method": {**spec(method), "start": "gradient"}})) as driver:
        assert finished(driver.warm_start(), driver.retry.run)
        return driver.server, states_of(driver)


def gradients() -> list[dict[str, torch.Tensor]]:
    """The gradient of each client at the first model, by plain autograd over all of its rows."""
    workload = Few()
    split = workload.split(0, 6)
    x = {name: value.double().requires_grad_() for name, value in workload.init(0).items()}
    network = Stateless(workload.build())
    found = []
    for rows in np.split(split.client_index.rows, split.client_index.offsets[1:-1]):
        image, label = torch.from_numpy(split.train["input"][rows]), torch.from_numpy(split.train["label"][rows])
        scaled = workload.inputs({"input": image}, torch.float64)
        loss = torch.nn.functional.cross_entropy(network(x, scaled), label)
        found.append(dict(zip(x, torch.autograd.grad(loss, list(x.values())), strict=True)))
    return found


@pytest.mark.parametrize("batch", [4, 5, 32])
@pytest.mark.parametrize("engine", [{"block": 1, "vectorise": False}, {"block": 3}, {"block": 6}], ids=str)
def test_control_variates_are_the_clients_gradients(batch: int, engine: dict[str, Any]):
    server, clients = opened("scaffold", batch, **engine)
    wanted = gradients()
    for own, gradient in zip(clients, wanted, strict=True):
        for name, value in gradient.items():
            torch.testing.assert_close(own.own[name], value, **TOLERANCE)
    for name in wanted[0]:
        mean = sum(gradient[name] for gradient in wanted) / len(wanted)
        torch.testing.assert_close(server.public.shared[name], mean, **TOLERANCE)


@pytest.mark.parametrize("method", WARM)
def test_the_start_does_not_depend_on_the_batch(method: str):
    """The server's state and every client's are the same after batches of 4 as after all rows at once."""
    small, large = opened(method, 4), opened(method, 32)
    for a, b in zip(pytree.tree_leaves(small), pytree.tree_leaves(large), strict=True):
        torch.testing.assert_close(a, b, **TOLERANCE)

"""Which convolutions of a block are quicker as batched products, measured for each of them on the run's own data.

A product is used only if it computes what torch's grouped convolution computes, within rounding: both are compared with
the same convolution in float64, on the inputs and the weights that the first block of round 1 has.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import get_unwrapped, maybe_get_bdim  # pyright: ignore[reportMissingImports]
from torch.func import vmap

from ...algorithms.tree import Tree
from ...workloads.workload import Split
from ..clients.batches import TaskBatches, stream
from ..clients.worker import Data, Worker
from ..errors import RAISED_BY_USERS
from ..kernels.agreement import Rounding, agrees
from ..kernels.block_convolutions import Arguments, as_product, convolutions_by, with_products
from ..run_spec import ExecutionPlan, RunSpec
from ..state.row_files import StateLayout
from .autotune import first_clients, short_run

REPEATS = 5
GAIN = 0.9
"""A product must take at most this share of the time of the grouped convolution."""

Form = Callable[[Arguments], Tensor]


def unbatched(tensor: Tensor) -> Tensor:
    """A tensor of a block with the clients' axis first."""
    return get_unwrapped(tensor).movedim(maybe_get_bdim(tensor), 0).detach()


def grouped(given: Arguments) -> Tensor:
    """The convolution by torch."""
    return torch.conv2d(*given)


def plan_with_products(run_spec: RunSpec, split: Split, plan: ExecutionPlan) -> ExecutionPlan | None:
    """The plan with those convolutions as products that are quicker so; None if none is, or if it cannot be told."""
    with torch.no_grad():
        try:
            found = convolutions(run_spec, split, plan)
            numbers = [number for number, given in enumerate(found) if is_quicker(given) and is_the_same(given)]
        except RAISED_BY_USERS:  # a loss that a block cannot compute, or no memory: the plan stays as it is
            return None
    return plan._replace(kernels=with_products(plan.kernels, numbers)) if numbers else None


def convolutions(run_spec: RunSpec, split: Split, plan: ExecutionPlan) -> list[Arguments]:
    """The arguments of the convolutions of the first block of round 1, in the order in which the loss calls them.
    Tensors have the clients' axis first."""
    data = Data.of(split.train, split.test, split.client_index)
    trial = short_run(run_spec, data, plan)
    worker = Worker(trial, data, StateLayout("", 0, False, False), lambda: None)
    work, experiment = first_clients(trial, data, plan.block), trial.experiment
    drawn = stream(data.client_index, work.clients, work.visits, experiment.federation.local, experiment.seed)
    count = work.cuts[0]
    batches = TaskBatches.of(drawn, worker.columns, worker.x.flat.dtype, worker.gather)
    points, found = worker.x.flat.expand(count, -1).clone(), list[Arguments]()

    def note(number: int, given: Arguments) -> None:
        tensors = [None if t is None else unbatched(t) for t in given[:3]]
        found.append(given._replace(**dict(zip(given._fields, tensors, strict=False))))

    def loss(flat: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return worker.run_spec.workload.losses({**dict(Tree(flat, worker.x.layout).items()), **worker.frozen}, batch)

    with convolutions_by(note):
        vmap(loss)(points, batches.at((slice(0, count), 0)))
    return found


def is_quicker(given: Arguments) -> bool:
    """Whether the product is quicker, with its gradients, by the least of some repetitions."""
    return seconds(as_product, given) <= GAIN * seconds(grouped, given)


def seconds(form: Form, given: Arguments) -> float:
    """Seconds of a convolution and its gradients, for all clients of the block."""
    gradients(form, given)
    found = []
    for _ in range(REPEATS):
        wait(given.input.device)
        began = time.perf_counter()
        gradients(form, given)
        wait(given.input.device)
        found.append(time.perf_counter() - began)
    return min(found)


def wait(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def gradients(form: Form, given: Arguments) -> list[Tensor]:
    """[the result, the gradients of inputs, weights and biases] of all clients, for a gradient that is the result."""

    def one(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return form(given._replace(input=x, weight=weight, bias=bias))

    with torch.enable_grad():
        tensors = [t.detach().requires_grad_() for t in given[:3] if t is not None]
        result = vmap(one)(*tensors)
        return [result.detach(), *torch.autograd.grad(result, tensors, result.detach())]


def is_the_same(given: Arguments) -> bool:
    """Whether the product computes what torch's convolution computes, within rounding."""

    def wide(t: Any) -> Any:
        return t.double() if isinstance(t, Tensor) else t

    expected = gradients(grouped, Arguments(*map(wide, given)))
    return agrees(expected, gradients(as_product, given), Rounding(gradients(grouped, given)))

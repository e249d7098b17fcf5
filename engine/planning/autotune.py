"""Measures how long a client takes with each of several execution plans, by running the first clients of a cohort.

On a GPU, it is then measured which convolutions of a block are quicker as batched products. A product is used only if
it computes what torch's grouped convolution computes, within rounding: both are compared with the same convolution in
float64, on the inputs and the weights that the first block of round 1 has.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._C._functorch import get_unwrapped, maybe_get_bdim  # pyright: ignore[reportMissingImports]
from torch.func import vmap
from torch.utils import _pytree as pytree

from ...algorithms.tree import Tree
from ...workloads.workload import Split
from ..accelerators.memory import allocated_memory, free_memory, peak_memory
from ..clients.batches import TaskBatches, stream
from ..clients.worker import Data, Worker
from ..cohorts.samplers import sample
from ..cohorts.tasks import Broadcast, ClientTask, TrainingTask, plan_tasks, steps_of
from ..config.schema import Local
from ..errors import RAISED_BY_USERS
from ..kernels.agreement import Rounding, agrees
from ..kernels.block_convolutions import Arguments, as_product, convolutions_by, with_products
from ..memory import release_freed_memory
from ..run_spec import ExecutionPlan, RunSpec
from ..state.row_files import StateLayout
from .kernel_proof import kernel_identity

SECONDS, GPU_SECONDS = 6.0, 30.0
"""The time after which no further plan is tried. On a GPU, libraries are loaded and steps are recorded meanwhile."""
MEMORY_SHARE = 0.8
"""The share of a worker's memory of a GPU that a block may take. The rest is for an evaluation, for recordings of other
shapes, and for what the worker's neighbours need for a moment."""
REPEATS = 4
STEPS, CLIENTS = 5, 4
"""The largest number of local steps per client, and the smallest number of clients if the cohort has as many."""
SLOWER_LIMIT = 1.1
"""Larger blocks are not tried once a block takes this many times as long as the best so far."""
HOPELESS = 2.0
"""A plan is not timed again once it takes this many times as long as the best of the others."""
STAGNANT = 0.9
"""Larger blocks of hopeless kernels are not tried either if a block takes this share of the time of smaller ones: they
would have to become twice as fast."""
TIMED = 5
"""The number of times that a convolution is timed."""
GAIN = 0.9
"""A product must take at most this share of the time of the grouped convolution."""

Form = Callable[[Arguments], Tensor]


def measure(run_spec: RunSpec, split: Split, candidates: list[ExecutionPlan]) -> dict[ExecutionPlan, float]:
    """Seconds per client for each candidate that ran, in their order.

    If a block fails, for example because memory runs out, larger blocks with the same kernels are not tried. Mistakes
    in a method or a workload are not reported here: they show in the run.
    """
    threads, began = torch.get_num_threads(), time.perf_counter()
    limit = SECONDS if run_spec.device.type == "cpu" else GPU_SECONDS
    data = Data.of(split.train, split.test, split.client_index)
    found: dict[ExecutionPlan, float] = {}
    best: dict[str, float] = {}  # by kernels, over blocks with several clients; one client alone runs without vmap
    done: set[str] = set()
    for plan in candidates:
        if plan.kernels in done or (found and time.perf_counter() - began > limit):
            continue
        try:
            found[plan] = seconds = fastest(time_plan(run_spec, data, plan), min(found.values(), default=math.inf))
        except RAISED_BY_USERS:
            done.add(plan.kernels)
            if run_spec.device.type != "cpu":
                release_freed_memory()
            continue
        if plan.block > 1:
            ratio = STAGNANT if seconds > HOPELESS * min(found.values()) else SLOWER_LIMIT
            if seconds > ratio * best.get(plan.kernels, math.inf):
                done.add(plan.kernels)
            best[plan.kernels] = min(best.get(plan.kernels, seconds), seconds)
    torch.set_num_threads(threads)
    if run_spec.device.type != "cpu":
        release_freed_memory()  # the workers, which are other processes, need it
    return found


def fastest(passes: Iterable[float], best: float) -> float:
    """The least of some times. No further one is asked for once one is hopeless beside the best of other plans."""
    least = math.inf
    for seconds in passes:
        least = min(least, seconds)
        if seconds > HOPELESS * best:
            break
    return least


def time_plan(run_spec: RunSpec, data: Data, plan: ExecutionPlan) -> Iterator[float]:
    """Seconds per client in each of REPEATS passes, after a first pass that does not count, or as many rounds as it
    takes until recorded steps are replayed."""
    trial = short_run(run_spec, data, plan)
    with torch.no_grad():
        method = trial.method()
        public = method.broadcast(method.server_init(trial.initial_model()))
    worker, room = Worker(trial, data, StateLayout("", 0, False, False), lambda: None), free_memory(trial.device)
    peak_memory(trial.device)
    held = allocated_memory(trial.device)
    shared = Broadcast(1, [leaf.cpu().numpy() for leaf in pytree.tree_leaves(public)])
    work = first_clients(trial, data, plan.block)
    for number in range(1, 1 + min(trial.kernels.warm_ups, trial.experiment.federation.rounds)):
        work = work._replace(round=number)
        worker.train(work, shared)
    if room is not None and (used := peak_memory(trial.device) - held) > MEMORY_SHARE * room:
        raise torch.OutOfMemoryError(f"a block of {plan.block} clients needs {used} of {room} bytes")
    for _ in range(REPEATS):
        began = time.perf_counter()
        worker.train(work, shared)
        yield (time.perf_counter() - began) / len(work.task.clients)


def short_run(run_spec: RunSpec, data: Data, plan: ExecutionPlan) -> RunSpec:
    """The run with this plan, without a folder, and with at most STEPS local steps per client."""
    experiment = run_spec.experiment
    federation = experiment.federation
    if int(steps_of(np.asarray(data.client_index.sizes), federation.local).max()) > STEPS:
        local = Local(steps=STEPS, batch=federation.local.batch)
        federation = federation.model_copy(update={"local": local})
    # Kernels that are not proven yet are measured as if they were: a plan is not used unless its kernels are proven.
    kernels = run_spec.kernels_named(plan.kernels)
    proven_kernels = kernel_identity(kernels, run_spec.device) if kernels.needs_proof else None
    return replace(
        run_spec,
        experiment=experiment.model_copy(update={"federation": federation}),
        directory=None,
        execution_plan=plan,
        proven_kernels=proven_kernels,
    )


def first_clients(run_spec: RunSpec, data: Data, block: int) -> TrainingTask:
    """A task of whole blocks from the cohort of round 1: the clients with the most steps, on their first visits."""
    federation, seed = run_spec.experiment.federation, run_spec.experiment.seed
    sampled = sample(seed, 1, federation.clients, federation.cohort)
    tasks = plan_tasks(sampled, data.client_index.sizes_of(sampled), federation.local, block)
    ordered = np.concatenate([task.clients for task in tasks])
    size = tasks[0].cuts[0]
    clients = ordered[: min(size * -(-CLIENTS // size), len(ordered))]
    cuts = [min(end, len(clients)) for end in range(size, len(clients) + size, size)]
    count, no_rows = len(clients), np.full(len(clients), -1)
    task = ClientTask(0, clients, tuple(cuts))
    return TrainingTask(
        task, 1, False, np.zeros(count, dtype=np.int64), np.ones(count), no_rows, no_rows, np.arange(count)
    )


# --- convolutions of a block as products ------------------------------------------------------------------------------
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
    return seconds_of(as_product, given) <= GAIN * seconds_of(grouped, given)


def seconds_of(form: Form, given: Arguments) -> float:
    """Seconds of a convolution and its gradients, for all clients of the block."""
    gradients(form, given)
    found = []
    for _ in range(TIMED):
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

"""Measures how long a client takes with each of several execution plans, by running the first clients of a cohort."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import numpy as np
import torch
from torch.utils import _pytree as pytree

from ...workloads.workload import Split
from ..accelerators.columns import DeviceColumns
from ..accelerators.memory import allocated_memory, free_memory, peak_memory, row_budget
from ..clients.worker import Data, Worker
from ..cohorts.samplers import sample
from ..cohorts.tasks import Broadcast, ClientTask, TrainingTask, plan_tasks, steps_of
from ..errors import RAISED_BY_USERS
from ..memory import release_freed_memory
from ..run_spec import ExecutionPlan, RunSpec
from ..state.row_files import StateLayout
from .execution_plan import keeps_a_gpu_busy
from .kernel_proof import kernel_identity

SECONDS = 6.0
"""The time after which no plan with several clients in a block is tried any more. Those for a client alone are tried in
any case: a large network takes longer for the first one, and gains most by other kernels."""
GPU_SECONDS, GPU_FIRST = 2.0, 1.2
"""The same on a GPU, where short runs are measured too. The plan that is tried then is left; the first one is left
earlier, so that others are tried as well."""
MEMORY_SHARE = 0.8
"""The share of a worker's memory of a GPU that a block may take. The rest is for an evaluation, for recordings of other
shapes, and for what the worker's neighbours need for a moment."""
REPEATS, ENOUGH = 4, 1.5
"""The number of passes that are timed, and the seconds after which no further one is: a pass of a large network takes
longer, and says alone how long a client takes."""
STEPS, GPU_STEPS, BUSY_STEPS, CLIENTS = 5, 2, 1, 4
"""The largest number of local steps per client, the same on a GPU and on a GPU that a client alone keeps busy, and the
smallest number of clients if the cohort has as many."""
SLOWER_LIMIT = 1.1
"""Larger blocks are not tried once a block takes this many times as long as the best so far."""
HOPELESS = 2.0
"""A plan is not timed again once it takes this many times as long as the best of the others."""
STAGNANT = 0.9
"""Larger blocks of hopeless kernels are not tried either if a block takes this share of the time of smaller ones: they
would have to become twice as fast."""


def measure(run_spec: RunSpec, split: Split, candidates: list[ExecutionPlan]) -> dict[ExecutionPlan, float]:
    """Seconds per client for each candidate that ran, in their order.

    If a block fails, for example because memory runs out, larger blocks with the same kernels are not tried. Mistakes
    in a method or a workload are not reported here: they show in the run.
    """
    threads, began = torch.get_num_threads(), time.perf_counter()
    on_gpu = run_spec.device.type != "cpu"
    end = began + (GPU_SECONDS if on_gpu else SECONDS)
    data = Data.of(split.train, split.test, split.client_index)

    @functools.cache
    def columns() -> DeviceColumns:
        return DeviceColumns(data.train, run_spec.device, row_budget(run_spec.device))

    found: dict[ExecutionPlan, float] = {}
    best: dict[str, float] = {}  # by kernels, over blocks with several clients; one client alone runs without vmap
    done: set[str] = set()
    failed: dict[str, int] = {}  # by kernels, the smallest block that failed
    for number, plan in enumerate(candidates):
        if (on_gpu or (found and plan.block > 1)) and time.perf_counter() > end:
            break
        if plan.kernels in done or plan.block >= failed.get(plan.kernels, math.inf):
            continue
        left_at = math.inf if not on_gpu else end if number else began + GPU_FIRST
        try:
            passes = time_plan(run_spec, data, plan, left_at, columns)
            found[plan] = seconds = fastest(passes, min(found.values(), default=math.inf))
        except TooSlow:
            continue
        except RAISED_BY_USERS:
            failed[plan.kernels] = plan.block
            if on_gpu:
                release_freed_memory()
            continue
        if plan.block > 1:
            ratio = STAGNANT if seconds > HOPELESS * min(found.values()) else SLOWER_LIMIT
            if seconds > ratio * best.get(plan.kernels, math.inf):
                done.add(plan.kernels)
            best[plan.kernels] = min(best.get(plan.kernels, seconds), seconds)
    torch.set_num_threads(threads)
    if on_gpu:
        release_freed_memory()  # the workers, which are other processes, need it
    return found


def fastest(passes: Iterable[float], best: float) -> float:
    """The least of some times. No further one is asked for once one is hopeless beside the best of other plans. Where
    the time is up, those that there are count. Raises TooSlow if there is none."""
    least = math.inf
    try:
        for seconds in passes:
            least = min(least, seconds)
            if seconds > HOPELESS * best:
                break
    except TooSlow:
        if least == math.inf:
            raise
    return least


class TooSlow(Exception):
    """A plan takes longer than the measurement has time."""


def time_plan(
    run_spec: RunSpec,
    data: Data,
    plan: ExecutionPlan,
    until: float = math.inf,
    columns: Callable[[], DeviceColumns] | None = None,
) -> Iterator[float]:
    """Seconds per client in each of REPEATS passes, of which none begins more than ENOUGH seconds after the first.

    A pass before them, in which recordings of steps are made, does not count. until: when TooSlow is raised before the
    next local step. columns: gives those of the training set, placed once for all plans; None to place them for this
    one.
    """

    def beat() -> None:
        if time.perf_counter() > until:
            raise TooSlow

    trial = short_run(run_spec, data, plan)
    with torch.no_grad():
        method = trial.method()
        public = method.broadcast(method.server_init(trial.initial_model()))
    worker = Worker(trial, data, StateLayout("", 0, False, False), beat, columns and columns())
    room = free_memory(trial.device)
    if worker.recorder is not None:
        worker.recorder.enough = 1  # what is computed with replays that are not proven yet is thrown away
    peak_memory(trial.device)
    held = allocated_memory(trial.device)
    shared = Broadcast(1, [leaf.cpu().numpy() for leaf in pytree.tree_leaves(public)])
    work = first_clients(trial, data, plan.block)
    worker.train(work, shared)
    if room is not None and (used := peak_memory(trial.device) - held) > MEMORY_SHARE * room:
        raise torch.OutOfMemoryError(f"a block of {plan.block} clients needs {used} of {room} bytes")
    first = time.perf_counter()
    for _ in range(REPEATS):
        began = time.perf_counter()
        worker.train(work, shared)
        ended = time.perf_counter()
        yield (ended - began) / len(work.task.clients)
        if ended - first > ENOUGH:
            return


def short_run(run_spec: RunSpec, data: Data, plan: ExecutionPlan) -> RunSpec:
    """The run with this plan, without a folder, and with at most STEPS local steps per client, GPU_STEPS on a GPU, or
    BUSY_STEPS where a client alone keeps it busy: the first pass takes each of them several times."""
    experiment = run_spec.experiment
    federation = experiment.federation
    on_gpu = BUSY_STEPS if keeps_a_gpu_busy(run_spec) else GPU_STEPS
    steps = STEPS if run_spec.device.type == "cpu" else on_gpu
    if int(steps_of(np.asarray(data.client_index.sizes), federation.local).max()) > steps:
        local = federation.local.taking(steps=steps)
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

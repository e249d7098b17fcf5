"""Measures how long a client takes on different paths, by running some of a cohort's first clients on each."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from torch.utils import _pytree as pytree

from ...workloads.base import Split
from ..clients.worker import Data, Worker
from ..cohorts import sampling
from ..cohorts.tasks import Broadcast, ClientTask, TrainingTask, plan_tasks, steps_of
from ..config.run_spec import ExecutionPlan, RunSpec
from ..config.schema import Local
from ..state.row_files import StateLayout
from .kernel_proof import kernel_identity

SECONDS = 6.0
"""After which no further path is tried."""
REPEATS = 4
STEPS, CLIENTS = 5, 4
"""At most so many local steps of each client; at least so many clients, where the cohort has them."""
SLOWER_LIMIT = 1.1
"""Larger blocks are not tried once one takes so many times the best so far."""


def measure(run_spec: RunSpec, split: Split, candidates: list[ExecutionPlan]) -> dict[ExecutionPlan, float]:
    """Seconds a client of the candidates that ran, in their order. A block for which there is no memory, or that fails
    otherwise, ends the larger ones of its kernels; what is wrong with a method or a workload shows in the run."""
    threads, began = torch.get_num_threads(), time.perf_counter()
    data = Data.of(split.train, split.test, split.client_index)
    found: dict[ExecutionPlan, float] = {}
    best: dict[str, float] = {}  # of the blocks so far; one client alone is run otherwise, and says nothing of blocks
    done: set[str] = set()
    for path in candidates:
        if path.kernels in done or (found and time.perf_counter() - began > SECONDS):
            continue
        try:
            found[path] = seconds = min(time_plan(run_spec, data, path))
        except Exception:
            done.add(path.kernels)
            continue
        if path.block > 1:
            if seconds > SLOWER_LIMIT * best.get(path.kernels, seconds):
                done.add(path.kernels)
            best[path.kernels] = min(best.get(path.kernels, seconds), seconds)
    torch.set_num_threads(threads)
    return found


def time_plan(run_spec: RunSpec, data: Data, path: ExecutionPlan) -> Iterator[float]:
    """Seconds a client, after a first pass that does not count."""
    experiment = run_spec.experiment
    plan = experiment.federation
    steps = int(steps_of(np.asarray(data.client_index.sizes), plan.local).max())
    short = plan.local
    if steps > STEPS:
        short = Local(steps=STEPS, batch=plan.local.batch)
    trial = replace(
        run_spec,
        experiment=experiment.model_copy(update={"federation": plan.model_copy(update={"local": short})}),
        directory=None,
        execution_plan=path,
        proven_kernels=kernel_identity()
        if path.kernels != "torch"
        else None,  # or it will be: what does not agree is not used
    )
    with torch.no_grad():
        method = trial.method()
        public = method.broadcast(method.server_init(trial.initial_model()))
    worker = Worker(trial, data, StateLayout("", 0, False, False), lambda: None)
    shared = Broadcast(1, [leaf.cpu().numpy() for leaf in pytree.tree_leaves(public)])
    work = first_clients(trial, data, path.block)
    worker.train(work, shared)
    for _ in range(REPEATS):
        began = time.perf_counter()
        worker.train(work, shared)
        yield (time.perf_counter() - began) / len(work.task.clients)


def first_clients(run_spec: RunSpec, data: Data, block: int) -> TrainingTask:
    """Whole blocks of round 1's cohort, the clients with most steps first, on their first visits."""
    plan, seed = run_spec.experiment.federation, run_spec.experiment.seed
    sampled = sampling.sample(seed, 1, plan.clients, plan.cohort)
    tasks = plan_tasks(sampled, data.client_index.sizes_of(sampled), plan.local, block)
    ordered = np.concatenate([task.clients for task in tasks])
    size = tasks[0].cuts[0]
    clients = ordered[: min(size * -(-CLIENTS // size), len(ordered))]
    cuts = [min(end, len(clients)) for end in range(size, len(clients) + size, size)]
    count, nobody = len(clients), np.full(len(clients), -1)
    task = ClientTask(0, clients, tuple(cuts))
    return TrainingTask(task, 1, False, np.zeros(count, dtype=np.int64), np.ones(count), nobody, nobody)

"""Measures what each kind of kernels, and each part of one, earns: a client's processor time without it and with it.

    OMP_NUM_THREADS=1 python benchmarks/kernel_rent.py [--only WORDS] [--passes 9]

Times are of the processor, of this process alone, so that they tolerate other work on the machine. The sides of a
comparison take turns; what is printed is the median of the ratios of all turns, with the least and the most. Works are
those of `fedfleet bench`, LeNet with a penalty (which is no chain), texts with padding, and clients of two rows.

A kind is compared with the fastest of the other kinds that the run can have, each in its best blocks. A part is
compared with the same kernels without it: functions of the engine are replaced for that. What only a GPU has (graph,
products, Newton-Schulz in bfloat16) is not measured here, see `benchmarks/gpu.py`.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch.utils import _pytree as pytree

from fedfleet.engine.clients import local_training
from fedfleet.engine.clients.local_training import ClientSteps
from fedfleet.engine.clients.worker import Data, Worker
from fedfleet.engine.cohorts.tasks import Broadcast
from fedfleet.engine.config.schema import experiment
from fedfleet.engine.kernels import channels_last, operators
from fedfleet.engine.planning import autotune
from fedfleet.engine.planning.execution_plan import all_kernels, candidates, disproof, why_not
from fedfleet.engine.reduction import accumulator
from fedfleet.engine.run_spec import ExecutionPlan, RunSpec
from fedfleet.engine.state.row_files import StateLayout
from fedfleet.tune.bench import works
from fedfleet.tune.bench.measure import METHODS

Off = Callable[[], AbstractContextManager[Any]]
"""Makes a context in which a part of the kernels is not used."""

TEXTS = {"name": "sst2", "stand_in": 800, "model": {"name": "rnn", "hidden": 256}, "length": 60}
FEDERATIONS: dict[str, dict[str, Any]] = {
    **works.FEDERATIONS,
    "regularised": works.FEDERATIONS["w1"],
    "texts": {"clients": 10, "cohort": 10, "local": {"steps": 2, "batch": 32}},
    "many_mlp": {"clients": 1000, "cohort": 1000, "local": {"epochs": 1, "batch": 2}},
}
WORKLOADS: dict[str, Any] = {
    "regularised": {"name": "regularised", "of": "w1"},
    "texts": TEXTS,
    "many_mlp": {"name": "many_mlp", "clients": 1000},
}
KINDS = ("w1", "w2", "w3", "w4", "w5", "w6", "regularised", "texts", "many_mlp")
"""The works on which whole kinds are compared."""


def without(functions: dict[Any, Any], *names: Any) -> Off:
    """Some functions of torch are not replaced."""

    @contextmanager
    def context() -> Iterator[None]:
        with patch.dict(functions):
            for name in names:
                del functions[name]
            yield

    return context


def replaced(owner: Any, name: str, other: Any) -> Off:
    return lambda: patch.object(owner, name, other)


def fedavg(*names: str) -> tuple[tuple[str, str], ...]:
    return tuple((name, "fedavg") for name in names)


def nothing(*given: Any) -> None:
    """In the place of a function whose result None or False leaves the work to others."""


def add_plainly(total: Any, parts: Any, more: bool, compiled: bool) -> None:
    operators.add_up(total, parts, more, compiled=False)


NOT_PASSED_OVER = ContextVar("not passed over", default=False)
FEDMUON = (("w1", "fedmuon_bc"), ("w1", "fedmuon_bc_bfloat16"), ("w2", "fedmuon_bc"))
NATIVE = operators.REPLACEMENTS
PARTS: tuple[tuple[str, str, tuple[tuple[str, str], ...], Off], ...] = (
    ("steps in one call", "chain", fedavg("w1", "w2"), replaced(ClientSteps, "descend", nothing)),
    ("Newton-Schulz", "chain", FEDMUON, replaced(operators, "iterated", nothing)),
    ("sums of messages", "chain", fedavg("w2", "w3"), replaced(accumulator, "add_up", add_plainly)),
    ("convolutions", "native", fedavg("regularised", "w3"), without(NATIVE, torch.conv2d)),
    ("padded places", "native", fedavg("texts"), replaced(operators, "PASS_OVER", NOT_PASSED_OVER)),
    ("minimal filtering", "channels_last", fedavg("w4", "w6"), replaced(channels_last, "pays", nothing)),
    ("replayed gradients", "torch", fedavg("w1", "w2", "many_mlp"), replaced(local_training, "RECORDED_BYTES", 0)),
)
"""(part, kernels that have it, works and methods on which it is measured, how it is left out)."""


ALONE = {"steps in one call", "replayed gradients"}
"""Parts that only clients have which train alone."""


def run_of(work: str, method: str, kernels: str = "auto") -> RunSpec:
    made = experiment(
        {
            "plugins": [works.__name__, str(Path(__file__).with_name("works.py"))],
            "workload": WORKLOADS.get(work, work),
            "method": METHODS.get(method, method),
            "federation": {**FEDERATIONS[work], "rounds": 1},
            "engine": {"backend": "local", "workers": 1, "kernels": kernels},
            "tracking": {"uri": "none"},
        }
    )
    return RunSpec.of("rent", made)


@functools.cache
def best_plan(work: str, method: str, kernels: str) -> ExecutionPlan | None:
    """The blocks in which the kernels are fastest, None if they cannot run."""
    run_spec = run_of(work, method, kernels)
    split = run_spec.split()
    return min(
        (found := autotune.measure(run_spec, split, candidates(run_spec, split))), key=found.__getitem__, default=None
    )


def clients(work: str, method: str, plan: ExecutionPlan, off: Off) -> Callable[[], float]:
    """What trains some clients, and returns the seconds of the processor that one has taken."""
    run_spec = run_of(work, method, plan.kernels)
    split = run_spec.split()
    data = Data.of(split.train, split.test, split.client_index)
    trial = autotune.short_run(run_spec, data, plan)
    algorithm = trial.method()
    public = algorithm.broadcast(algorithm.server_init(trial.initial_model()))
    shared = Broadcast(1, [leaf.numpy() for leaf in pytree.tree_leaves(public)])
    task = autotune.first_clients(trial, data, plan.block)
    with off():
        worker = Worker(trial, data, StateLayout("", 0, False, False), lambda: None)

    def once() -> float:
        with off():
            began = time.process_time()
            worker.train(task, shared)
            return (time.process_time() - began) / len(task.clients)

    once()
    return once


def compared(sides: list[Callable[[], float]], passes: int) -> list[list[float]]:
    """For each pass, the seconds of each side. Sides that are short are repeated."""
    least = min(side() for side in sides)
    times = max(1, int(0.1 / least / 4))
    return [[median(side() for _ in range(times)) for side in sides] for _ in range(passes)]


def row(kernels: str, work: str, found: list[tuple[float, float]]) -> str:
    """A line of the table. found: (seconds, seconds without these kernels) in each pass."""
    own, rents = median(seconds for seconds, _ in found), [other / seconds for seconds, other in found]
    spread = f"{median(rents):.2f} ({min(rents):.2f} … {max(rents):.2f})"
    return f"| {kernels} | {work} | {1e3 * own:.2f} | {spread} | {len(found)} |"


def rent_of_kinds(work: str, method: str, passes: int) -> Iterator[str]:
    run_spec = run_of(work, method)
    split = run_spec.split()
    kinds = [
        str(kernels)
        for kernels in all_kernels(run_spec)
        if kernels.is_promising(run_spec) and not why_not(run_spec, kernels)
        if disproof(run_spec, split, kernels) is None
    ]
    plans = [plan for kind in kinds if (plan := best_plan(work, method, kind))]
    if len(plans) < 2:
        return
    found = compared([clients(work, method, plan, nullcontext) for plan in plans], passes)
    for place, plan in enumerate(plans):
        pairs = [(each[place], min(each[:place] + each[place + 1 :])) for each in found]
        yield row(plan.kernels, f"{work} {method}, blocks of {plan.block}", pairs)


def rent_of_part(part: str, kernels: str, work: str, method: str, off: Off, passes: int) -> Iterator[str]:
    plan = ExecutionPlan(1, kernels) if part in ALONE else best_plan(work, method, kernels)
    if plan is None:
        return
    found = compared([clients(work, method, plan, nullcontext), clients(work, method, plan, off)], passes)
    pairs = [(with_it, without_it) for with_it, without_it in found]
    yield row(f"{kernels}: {part}", f"{work} {method}, blocks of {plan.block}", pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", default="", help="only rows whose names have these words, as in 'native: conv'")
    parser.add_argument("--passes", type=int, default=9)
    asked = parser.parse_args()
    print("| kernels | work | ms of the processor | without them | passes |\n| --- | --- | ---: | ---: | ---: |")
    with patch("time.perf_counter", time.process_time):
        for work in KINDS:
            if asked.only in f"kinds {work}":
                print(*rent_of_kinds(work, "fedavg", asked.passes), sep="\n", flush=True)
        for part, kernels, where, off in PARTS:
            for work, method in where:
                if asked.only in f"{kernels}: {part} {work}":
                    print(*rent_of_part(part, kernels, work, method, off, asked.passes), sep="\n", flush=True)


if __name__ == "__main__":
    main()

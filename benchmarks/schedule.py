"""Simulates how busy the workers of a large cluster would be and how much time the driver needs, without the cluster.

    python -m benchmarks.schedule record            block times of this machine, into benchmarks/block_times.json
    python -m benchmarks.schedule                   8 nodes x 8 workers, 10,000 clients per round, 5 rounds
    python -m benchmarks.schedule record --times benchmarks/block_times_held_out.json --seed 1 --beta 0.2 --epochs 3
    python -m benchmarks.schedule --times benchmarks/block_times_held_out.json --seed 1 --epochs 3

No parameter was fitted to the second recording, which has other clients, of more unequal sizes, and other numbers of
steps.

The driver and its part of the pool of several nodes (engine/backends/ray/cluster_pool.py) are the real ones. A clock
replaces Ray: a task takes the recorded times of its blocks, and 2 ms on the way there and back; rows that move take
their bytes at 1 GB/s. The processor time of the driver's process is measured, without that of the replacement; Ray's
own calls are not included. There are two bounds: all work divided by all workers, and longest-first of single blocks at
no cost. `results` counts the tasks on other nodes than the driver's, `sums` the sums that come from these nodes.
"""

from __future__ import annotations

import argparse
import heapq
import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from torch.utils import _pytree as pytree

from fedfleet.engine.backends.ray import cluster_pool
from fedfleet.engine.backends.ray.node_agent import Add, News
from fedfleet.engine.backends.ray.worker_pool import Hooks, WorkerRequest
from fedfleet.engine.clients.worker import Data, Worker
from fedfleet.engine.cohorts.tasks import Broadcast, TrainingTask, plan_tasks, steps_of
from fedfleet.engine.config.schema import experiment
from fedfleet.engine.reduction.tree import PartialSum, TaskResult, TreeNode, TreeReducer
from fedfleet.engine.rounds.driver import DataSummary, Driver
from fedfleet.engine.runs.launch import prepare
from fedfleet.engine.state.table import Table
from fedfleet.workloads.client_index import ClientIndex

RECORDED = Path(__file__).parent / "block_times.json"
CALL, BANDWIDTH = 2e-3, 1e9  # seconds; bytes per second
BLOCK, BATCH = 16, 8
TIMES = 5
"""How often each block runs while it is recorded; the shortest time counts."""


def setting(workload: Any, clients: int, asked: argparse.Namespace) -> Any:
    return experiment(
        {
            "seed": asked.seed,
            "workload": workload,
            "method": {"name": "scaffold", "rule": {"name": "sgd", "lr": 0.05}},
            "federation": {
                "clients": clients,
                "cohort": clients,
                "rounds": asked.rounds,
                "local": {"epochs": asked.epochs, "batch": BATCH},
            },
            "engine": {"backend": "local", "block": BLOCK},
            "evaluate": {"every": 0},
            "tracking": {"uri": "none"},
        }
    )


def whole_blocks(task: TrainingTask) -> list[TrainingTask]:
    """The blocks of a task, each as a task of its own."""
    return [task.blocks(TreeNode(0, i), i, i + 1) for i in range(len(task.cuts))]


# --- block times ------------------------------------------------------------------------------------------------------
def record(asked: argparse.Namespace) -> None:
    """Write the steps and seconds of the blocks of a real round, with clients of unequal size on the digits."""
    partition = {"name": "quantity", "beta": asked.beta}
    run_spec = prepare(setting({"name": "digits", "partition": partition}, 160, asked), "record")
    split, x = run_spec.split(), run_spec.initial_model()
    driver = Driver(run_spec, DataSummary(split.client_index, 1))
    worker = Worker(run_spec, Data.of(split.train, split.test, split.client_index), driver.table.layout, lambda: None)
    everyone = np.arange(160)
    local = run_spec.experiment.federation.local
    sizes = split.client_index.sizes_of(everyone)
    read, write = driver.table.reserve(everyone)
    columns = (np.zeros(160, dtype=np.int64), np.ones(160), read, write)
    shared = Broadcast(1, [leaf.numpy() for leaf in pytree.tree_leaves(driver.server.public)])
    times = []
    for task in plan_tasks(everyone, sizes, local, BLOCK):
        for work in whole_blocks(TrainingTask.of(task, (1, False), everyone, columns)):
            steps = int(steps_of(split.client_index.sizes_of(work.task.clients), local).max())
            times.append([steps, min(seconds_of(worker, work, shared) for _ in range(TIMES))])
    driver.table.remove()
    found = {"parameters": x.flat.numel(), "sizes": sizes.tolist(), "blocks": sorted(times)}
    asked.times.write_text(json.dumps(found) + "\n")
    print(f"{len(times)} blocks of {min(times)[0]} to {max(times)[0]} steps, in {asked.times}")


def seconds_of(worker: Worker, work: TrainingTask, shared: Broadcast) -> float:
    began = time.perf_counter()
    worker.train(work, shared)
    return time.perf_counter() - began


# --- replacement of Ray -----------------------------------------------------------------------------------------------
class Reference:
    """Replaces a reference of Ray: a result, and the time from which on it is there. Both may be functions, which are
    called later."""

    def __init__(self, end: float, result: Any) -> None:
        self.end, self.result = end, result


class Clock:
    """Replaces Ray. `spent`: processor seconds of this replacement, which a real run does not need."""

    def __init__(self, seconds: dict[int, float]) -> None:
        self.seconds, self.now, self.spent, self.blocks = seconds, 0.0, 0.0, 0
        self.units: list[float] = []  # seconds of each block of this round

    def put(self, value: Any) -> Any:
        return value

    def get(self, reference: Reference) -> Any:
        result = reference.result
        return result() if callable(result) else result

    def kill(self, actor: Any) -> None: ...

    def wait(self, references: list[Any], timeout: float = 0.0, **how: Any) -> tuple[list[Any], list[Any]]:
        """The references whose results are there now. With a timeout, the clock first goes on to the first of them."""
        began = time.process_time()
        ends = [end_of(reference) for reference in references]
        if timeout:
            self.now = max(self.now, min(ends))
        ready = [reference for reference, end in zip(references, ends, strict=True) if end <= self.now]
        self.spent += time.process_time() - began
        return ready, []


def end_of(reference: Reference) -> float:
    """The time from which on the result is there."""
    return reference.end() if callable(reference.end) else reference.end


class Remote:
    """A method of an actor."""

    def __init__(self, call: Any) -> None:
        self.remote = call


class SimulatedAgent:
    """Replaces the agent of a node, its connection, and its workers, each of which takes the recorded times of its
    blocks."""

    def __init__(self, clock: Clock, cluster: Any, local: Any) -> None:
        self.clock, self.cluster, self.local = clock, cluster, local
        self.free = [0.0] * cluster.workers
        self.leaves = [np.zeros(tuple(leaf.shape)) for leaf in pytree.tree_leaves(cluster.state_spec.message)]
        self.finished: list[tuple[float, TaskResult]] = []
        self.version = self.left = 0
        for name in ("add", "read", "write"):
            setattr(self, name, Remote(getattr(self, f"_{name}")))

    def send(self, add: Add) -> None:
        self._add(add)

    def _read(self, rows: np.ndarray) -> np.ndarray:
        return rows

    def _write(self, rows: np.ndarray, packed: np.ndarray) -> Reference:
        return Reference(self.clock.now + 2 * CALL + len(rows) * self.cluster.row_bytes / BANDWIDTH, None)

    def _add(self, add: Add, *moves: Reference) -> Reference:
        """moves: references to rows that are on their way."""
        self.version, self.left = add.version, add.left
        if add.begin is not None:
            self.reducer = TreeReducer(add.begin.shape, lambda left, right: left)
        began, clock = time.process_time(), self.clock
        there = max([clock.now + CALL, *(move.end for move in moves)])
        for task in add.tasks:
            took = 0.0
            for block in whole_blocks(task):
                steps = int(steps_of(self.cluster.sizes[block.clients], self.local).max())
                took += clock.seconds[steps]
                clock.units.append(clock.seconds[steps])
                clock.blocks += 1
            end = max(there, self.free[0]) + took
            heapq.heapreplace(self.free, end)
            heapq.heappush(self.finished, (end, id(task), self._result(task)))
            self.reducer.put(self.reducer.shape.node_of(task), self.leaves)
        clock.spent += time.process_time() - began
        return Reference(there, None)

    def end(self) -> float:
        """The time at which the next news are there: once at most `Add.left` tasks are under way."""
        ends = sorted(item[0] for item in self.finished)
        return ends[max(0, len(ends) - self.left - 1)] + CALL if ends else float("inf")

    def receive(self) -> News:
        """The results of all tasks that have ended, and the sums if these are all."""
        found, sums = [], []
        while self.finished and self.finished[0][0] + CALL <= self.clock.now:
            found.append(heapq.heappop(self.finished)[-1])
        if not self.finished:
            sums = [PartialSum(*item) for item in self.reducer.parts.items()]
            self.reducer.parts.clear()
        return News(self.version, [], found, self.cluster.workers, sums)

    def _result(self, task: TrainingTask) -> TaskResult:
        count = len(task.clients)
        names = ("loss", "steps", "gradients", "weight", "state", "data", "reduce", "seconds")
        facts, none = dict.fromkeys(names, float(count)), np.zeros(count)
        clients = {"id": task.clients, "loss": none, "norm2": none, "steps": none}
        return TaskResult(task.index, None, facts, clients, branch=task.branch)


class SimulatedBell:
    """Replaces the bell that rings when Ray has answered. `answered`: returns what has been answered."""

    def __init__(self, answered: Callable[[], list[Any]]) -> None:
        self.answered = answered

    def watch(self, reference: Any) -> None: ...

    def rang(self) -> bool:
        return bool(self.answered())


class SimulatedPool(cluster_pool.ClusterPool):
    """The pool of several nodes with simulated agents, and nodes that neither join nor leave."""

    def __init__(self, run_spec: Any, table: Table, clock: Clock, cluster: Any) -> None:
        local = run_spec.experiment.federation.local
        steps = steps_of(cluster.sizes, local)
        super().__init__(run_spec, [], table, Hooks(lambda: None, lambda line: None), steps, None)
        self.clock = clock
        group = self.groups[0]
        for node in range(cluster.nodes):
            worker_requests = [WorkerRequest(group, None)] * cluster.workers
            actor: Any = SimulatedAgent(clock, cluster, local)
            names = str(node), str(node), self.locations.add()
            agent = cluster_pool.Agent(*names, group, worker_requests, actor, cluster.workers, node)
            agent.link, agent.alive = actor, Reference(float("inf"), None)
            self.agents.append(agent)
        self.bell: Any = SimulatedBell(lambda: self.clock.wait([*self.moving])[0])

    def _wait(self) -> list[Any]:
        """The agents with news, and the bell if rows have moved, once there is one of them."""
        sources = [*self.moving, *(agent.link for agent in self.agents)]
        ready = self.clock.wait(sources, timeout=1)[0]
        return [*ready, self.bell]

    def _grow(self) -> None: ...

    def close(self) -> None: ...


# --- rounds -----------------------------------------------------------------------------------------------------------
def longest_first(blocks: list[float], workers: int) -> float:
    """The time at which the last worker ends if each takes the longest block that is left."""
    free = [0.0] * workers
    for block in sorted(blocks, reverse=True):
        heapq.heapreplace(free, free[0] + block)
    return max(free)


def simulate(asked: argparse.Namespace) -> None:
    recorded = json.loads(asked.times.read_text())
    draw = np.random.default_rng(asked.seed)
    sizes = draw.choice(np.array(recorded["sizes"]), asked.clients)
    client_index = ClientIndex(np.concatenate([[0], np.cumsum(sizes)]), np.zeros(int(sizes.sum()), dtype=np.int64))
    run_spec = prepare(setting({"name": "quadratic", "dim": 10}, asked.clients, asked), "schedule")
    steps, seconds = (np.array(column) for column in zip(*recorded["blocks"], strict=True))
    line = np.polyfit(steps, seconds, 1)
    known = {int(k): float(np.median(seconds[steps == k])) for k in np.unique(steps)}
    most = int(steps_of(sizes, run_spec.experiment.federation.local).max())
    clock = Clock({k: known.get(k, float(np.polyval(line, k))) for k in range(1, most + 1)})
    cluster_pool.ray = clock  # type: ignore[attr-defined]
    driver = Driver(run_spec, DataSummary(client_index, 1))
    cluster = SimpleNamespace(nodes=asked.nodes, workers=asked.workers // asked.nodes, row_bytes=asked.row_bytes)
    cluster.sizes, cluster.state_spec = sizes, driver.state_spec
    driver.start(lambda table: SimulatedPool(run_spec, table, clock, cluster))
    driver._evaluate = lambda x: {}  # nothing to compute
    print(
        f"{asked.nodes} nodes, {asked.workers} workers, {asked.clients:,} clients per round, "
        f"rows of {asked.row_bytes:,.0f} B"
    )
    print("round  blocks  driver ms/block  seconds  over ideal  over longest first  rows moved  results  sums")
    try:
        for number in range(1, asked.rounds + 1):
            clock.units, clock.spent, clock.blocks = [], 0.0, 0
            before, began = clock.now, time.process_time()
            record = driver.run_round({})
            wall, took = time.process_time() - began - clock.spent, clock.now - before
            ideal, bound = sum(clock.units) / asked.workers, longest_first(clock.units, asked.workers)
            moved = record["node/bytes_moved"] / driver.table.width
            print(
                f"{number:5}  {clock.blocks:6}  {1000 * wall / clock.blocks:15.3f}  {took:7.3f}"
                f"  {took / ideal - 1:10.1%}  {took / bound - 1:18.1%}  {moved:10.0f}"
                f"  {record['node/results']:7.0f}  {record['node/sums']:4.0f}"
            )
    finally:
        driver.table.remove()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["record", "simulate"], default="simulate")
    for name, default in (("nodes", 8), ("workers", 64), ("clients", 10_000), ("rounds", 5), ("row-bytes", 250_000)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--times", type=Path, default=RECORDED)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--beta", type=float, default=0.5, help="Dirichlet parameter of the recorded clients' sizes")
    given = parser.parse_args()
    record(given) if given.what == "record" else simulate(given)

"""Without Ray: a task that is split into branches for many workers gives the same bits, and the scheduler chooses which
node gets which task."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from torch.utils import _pytree as pytree

from fedfleet.engine.api import prepare
from fedfleet.engine.backends.ray.placement import Node, placed, wanted
from fedfleet.engine.backends.ray.row_locations import RowLocations
from fedfleet.engine.backends.ray.scheduler import IN_FLIGHT, Pace, Scheduler
from fedfleet.engine.backends.ray.task_splitting import branches_of, split_tasks
from fedfleet.engine.clients.worker import Data, Worker
from fedfleet.engine.cohorts.tasks import Broadcast, ClientTask, TrainingTask, steps_of
from fedfleet.engine.config.schema import Engine, WorkerGroup
from fedfleet.engine.method_form.state_spec import StateSpec
from fedfleet.engine.reduction.tree import TaskResult, TreeReducer, TreeShape, add_results
from fedfleet.engine.state.row_table import RowTable

from ..engine.setups import EPOCHS, digits


@pytest.fixture(scope="module", params=[EPOCHS, {"steps": 3, "batch": 64}], ids=["short batches", "small clients"])
def worker_and_task(request, tmp_path_factory):
    """(a worker, the longest task of a round with all clients, which has several blocks of unequal clients). Some
    batches are short in all blocks, or the largest clients have more rows than others in a batch."""
    made = digits("scaffold", request.param, kernels="torch")
    network, partition = {"name": "mlp", "hidden": [64]}, {"name": "dirichlet", "beta": 0.1}
    data = {"name": "digits", "model": network, "partition": partition}
    run_spec = prepare(made.model_copy(update={"workload": data}), "pieces")
    split, method, x = run_spec.split(), run_spec.method(), run_spec.initial_model()
    table = RowTable(StateSpec(method, x).client, 30, 30, str(tmp_path_factory.mktemp("state")), digests=True)
    worker = Worker(run_spec, Data.of(split.train, split.test, split.client_index), table.layout, lambda: None)
    everyone = np.arange(30)
    sizes = split.client_index.sizes_of(everyone)
    steps = steps_of(sizes, run_spec.experiment.federation.local)
    ordered = everyone[np.lexsort((everyone, -steps))]
    task = ClientTask(0, ordered, (*range(4, 29, 4), 30))
    read, write = table.reserve(everyone)
    columns = (np.zeros(30, dtype=np.int64), np.ones(30), read, write)
    shared = Broadcast(1, [leaf.numpy() for leaf in pytree.tree_leaves(method.server_init(x).public)])
    yield worker, TrainingTask.of(task, (1, False), everyone, columns), shared
    table.remove()


@pytest.mark.parametrize("most", [1, 2, 3, 5])
def test_branches_give_the_bits_of_the_whole(most, worker_and_task):
    worker, task, shared = worker_and_task
    whole = worker.train(task, shared)
    shape = TreeShape([1, len(task.cuts)])
    task = task._replace(task=task.task._replace(index=1))
    reducer = TreeReducer(shape, add_results)
    branches = branches_of(task, np.ones(30), 4.0 * most)
    assert len(branches) > 1
    for branch in reversed(branches):  # the last one first
        assert shape.node_of(task) not in reducer.parts
        result = worker.train(branch, shared)
        reducer.put(shape.node_of(result), result)
    found = reducer.parts[shape.node_of(task)]
    for one, other in zip(whole.leaves, found.leaves, strict=True):
        assert one.tobytes() == other.tobytes()
    untimed = {name for name in whole.facts if name not in ("seconds", "state", "data", "reduce")}
    assert all(whole.facts[name] == found.facts[name] for name in untimed)
    assert whole.clients.keys() == found.clients.keys()
    for name, values in whole.clients.items():
        np.testing.assert_array_equal(values, found.clients[name])


@pytest.mark.parametrize("absent", [[0], [4, 5, 6, 7], [0, 1, 2, 3, 4, 5, 6, 7, 29], list(range(1, 30)), [28, 29]])
@pytest.mark.parametrize("block", [1, 4])
def test_branches_give_the_bits_of_the_whole_without_some_clients(absent, block, worker_and_task):
    """The bits are the same whichever clients are dropped, because empty blocks keep their place in the tree. Blocks of
    one client are added four at a time, which must not change the order."""
    worker, task, shared = worker_and_task
    task = task._replace(task=task.task._replace(cuts=(*range(block, 30, block), 30)))
    present = np.setdiff1d(np.arange(30), absent)
    whole = worker.train(task.subset(present), shared)
    assert whole.clients["id"].tolist() == task.clients[present].tolist()
    shape = TreeShape([len(task.cuts)])
    reducer = TreeReducer(shape, add_results)
    for branch in branches_of(task, np.ones(30), 8.0):
        there = np.flatnonzero(np.isin(branch.clients, task.clients[present]))
        result = worker.train(branch.subset(there), shared) if len(there) else TaskResult.nothing(branch)
        reducer.put(shape.node_of(result), result)
    for one, other in zip(whole.leaves, reducer.total().leaves, strict=True):
        assert one.tobytes() == other.tobytes()


def test_few_workers_leave_tasks_whole(worker_and_task):
    _, task, _ = worker_and_task
    tasks = [task._replace(task=task.task._replace(index=i)) for i in range(20)]
    assert split_tasks(tasks, 1, np.ones(30)) == tasks
    many = split_tasks(tasks, 64, np.ones(30))
    assert all(branch.branch is not None for branch in many)
    assert sum(len(branch.cuts) for branch in many) == 20 * 8


def test_rows_are_where_they_were_written_or_copied():
    locations = RowLocations(10)
    assert [locations.add() for _ in range(2)] == [1, 2]
    rows = np.array([2, 3, 4])
    assert locations.held(rows).tolist() == [3, 0, 0]
    locations.wrote(1, np.array([3, 4]))
    locations.copied(2, np.array([4]))
    assert locations.held(rows).tolist() == [1, 2, 1]
    assert [(node, rows.tolist()) for node, rows in locations.missing(2, rows)] == [(0, [2]), (1, [3])]
    locations.lose(1)
    assert locations.gone(rows).tolist() == [3]


def work(index: int, rows: list[int]) -> TrainingTask:
    count = len(rows)
    task = ClientTask(index, np.arange(count), (count,))
    return TrainingTask(
        task, 1, False, np.zeros(count), np.ones(count), np.array(rows), np.arange(count) + 100, np.arange(count)
    )


def waiting(works: list[Any], locations: RowLocations, steps: np.ndarray) -> Scheduler:
    scheduler = Scheduler(locations, steps)
    for each in works:
        scheduler.put(each)
    return scheduler


def test_a_node_gets_what_it_has_before_what_others_have():
    locations = RowLocations(200)
    locations.add()
    locations.wrote(1, np.array([5, 6]))
    works = [work(index, rows) for index, rows in enumerate([[1, 2], [3, 4], [5, 6], [7, -1]])]
    scheduler, pace = waiting(works, locations, np.ones(2, dtype=np.int64)), Pace(3, 0.0, 0.0, 0)
    assert [item.task.index for item in scheduler.take(1, 0.0, 0, pace)] == [2]
    assert [item.task.index for item in scheduler.take(1, 0.0, 0, pace)] == [0]  # it has none of the rows: the longest
    assert [item.task.index for item in scheduler.take(0, 0.0, 0, pace)] == [1]


@pytest.mark.parametrize(("tasks", "calls"), [(40, [10] * 4), (12, [3] * 4), (120, [25] * 4 + [20])])
def test_short_tasks_share_a_call(tasks, calls):
    """A call takes 50 ms if there are enough tasks, and a quarter of the phase of two workers otherwise. A task that
    is to run alone is the only one of its call."""
    locations, each = RowLocations(10), np.ones(1, dtype=np.int64)
    scheduler = waiting([work(index, [-1]) for index in range(tasks)], locations, each)
    pace = Pace(2, 500.0, 1000.0, 0)
    found = []
    while len(scheduler):
        found.append([item.task.index for item in scheduler.take(0, 500.0, 0, pace)])
    assert list(map(len, found)) == calls
    assert [index for call in found for index in call] == list(range(tasks))
    scheduler.put(work(0, [-1]), alone=True)
    scheduler.put(work(1, [-1]))
    assert len(scheduler.take(0, 500.0, 0, pace)) == 1


def makespan(speeds: list[float], told: list[float], steps: np.ndarray) -> float:
    """The duration of a round whose tasks are single clients, with one worker of each speed. steps: of each client;
    told: the speeds that the scheduler knows, in calls that take so long that each has one task."""
    works = [
        TrainingTask(ClientTask(index, np.array([index]), (1,)), 1, False, *[np.full(1, -1)] * 5)
        for index in range(len(steps))
    ]
    scheduler = waiting(works, RowLocations(10), steps)
    calls: list[tuple[float, int, int]] = []  # (end, worker, steps)
    free, load, now = [0.0] * len(speeds), [0] * len(speeds), 0.0
    while len(scheduler) or calls:
        for worker in sorted(range(len(speeds)), key=lambda each: -told[each]):
            pace = Pace(len(told), max(told), sum(told), sum(load))
            while len([call for call in calls if call[1] == worker]) < IN_FLIGHT:
                items = scheduler.take(0, told[worker], load[worker], pace)
                if not items:
                    break
                count = sum(item.steps for item in items)
                free[worker] = max(free[worker], now) + count / speeds[worker]
                load[worker] += count
                calls.append((free[worker], worker, count))
        calls.sort()
        now, worker, count = calls.pop(0)
        load[worker] -= count
    return now


def test_slow_workers_take_nothing_that_the_others_would_wait_for():
    """Three workers, one of which has an eighth of the speed of the others, and tasks of 1 to 40 steps, of which the
    longest come first."""
    steps = np.arange(40, 0, -1)
    speeds = [1.0, 0.125, 1.0]
    ideal = steps.sum() / sum(speeds)
    assert makespan(speeds, speeds, steps) < 1.08 * ideal
    assert makespan(speeds, [1.0, 1.0, 1.0], steps) > 1.3 * ideal


def test_groups_go_where_there_is_room():
    nodes = [Node("a", "a", {"CPU": 2.0, "GPU": 1.0}, {}), Node("b", "b", {"CPU": 4.0}, {"zone": "east"})]
    four, two = WorkerGroup(count=4, cpus=0.25, gpus=0.25), WorkerGroup(count=2, cpus=1)
    spots, left = placed([four] * 4 + [two] * 2, nodes)
    assert [spot.node for spot in spots] == ["a"] * 5 + ["b"]
    assert not left
    assert [spot.node for spot in placed([two] * 4, nodes, spread=True)[0]] == ["a", "b", "a", "b"]
    assert [spot.node for spot in placed([WorkerGroup(count=1, cpus=1, labels={"zone": "east"})], nodes)[0]] == ["b"]
    assert placed([WorkerGroup(count=1, cpus=1, labels={"zone": "west"})], nodes)[1]
    assert placed([WorkerGroup(count=1, cpus=1, resources={"disk": 1.0})], nodes)[1]


def test_by_default_every_processor_of_a_cluster_gets_a_worker_of_a_group_that_the_run_starts():
    nodes = [Node("a", "a", {"CPU": 3.0}, {}), Node("b", "b", {"CPU": 2.5}, {})]
    engine = Engine(address="10.0.0.1:6379", cpus=1.0)
    assert wanted(engine, nodes) == [*engine.groups()] * 5
    spots, left = placed(wanted(engine, nodes), nodes)
    assert [spot.node for spot in spots] == ["a", "a", "a", "b", "b"]
    assert not left
    assert all(spot.group in engine.groups() for spot in spots)

"""A task cut into pieces for many workers: the same bits as in one; and who gets what, without Ray."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from torch.utils import _pytree as pytree

from fedfleet.engine.backends.base import Failure
from fedfleet.engine.backends.ray.locality import Desk, Whereabouts
from fedfleet.engine.backends.ray.nodes import Node, placed
from fedfleet.engine.backends.ray.task_splitting import Joiner, Piece, cut, pieces
from fedfleet.engine.clients.worker import Data, Worker
from fedfleet.engine.cohorts.tasks import Broadcast, ClientTask, TrainingTask, steps_of
from fedfleet.engine.config.schema import WorkerGroup
from fedfleet.engine.methods.state_spec import StateSpec
from fedfleet.engine.reduction.tree import TaskResult, TreeShape
from fedfleet.engine.runs.launch import prepare
from fedfleet.engine.state.table import Table

from ..engine.setups import EPOCHS, digits


@pytest.fixture(scope="module")
def worker_and_task(tmp_path_factory):
    """A worker, and the longest task of a round that all clients are in: several blocks of unequal clients."""
    run_spec = prepare(digits("scaffold", EPOCHS), "pieces")
    split, method, x = run_spec.split(), run_spec.method(), run_spec.initial_model()
    table = Table(StateSpec(method, x).client, 30, 30, (str(tmp_path_factory.mktemp("state")), False, True))
    worker = Worker(run_spec, Data.of(split.train, split.test, split.client_index), table.place, lambda: None)
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
def test_the_bits_of_the_whole(most, worker_and_task):
    worker, task, shared = worker_and_task
    whole = worker.train(task, shared)
    joiner, joined = Joiner(), None
    for piece in reversed(pieces(task, np.ones(30), 4.0 * most)):  # the last one first
        assert joined is None
        joined = joiner.add(piece, worker.train(piece.work, shared))
    assert joined is not None
    found = joined[1]
    assert isinstance(found, TaskResult)
    for one, other in zip(whole.leaves, found.leaves, strict=True):
        assert one.tobytes() == other.tobytes()
    untimed = {name for name in whole.facts if name not in ("seconds", "state", "data", "reduce")}
    assert all(whole.facts[name] == found.facts[name] for name in untimed)
    assert whole.clients.keys() == found.clients.keys()
    for name, values in whole.clients.items():
        np.testing.assert_array_equal(values, found.clients[name])


def test_few_workers_leave_tasks_whole(worker_and_task):
    _, task, _ = worker_and_task
    tasks = [task._replace(task=task.task._replace(index=i)) for i in range(20)]
    assert cut(tasks, 1, np.ones(30)) == tasks
    many = cut(tasks, 64, np.ones(30))
    assert all(isinstance(piece, Piece) for piece in many)
    assert sum(len(piece.work.task.cuts) for piece in many) == 20 * 8


def test_a_piece_that_fails_is_the_tasks_failure_once(worker_and_task):
    _, task, _ = worker_and_task
    first, second, *_ = pieces(task, np.ones(30), 1.0)
    joiner = Joiner()
    assert joiner.add(second, Failure("cause", "where")) == (task, Failure("cause", "where"))
    assert joiner.add(first, Failure("cause", "elsewhere")) is None


def test_rows_are_where_they_were_written_or_copied():
    where = Whereabouts(10)
    assert [where.add() for _ in range(3)] == [0, 1, 2]
    rows = np.array([2, 3, 4])
    assert where.held(rows).tolist() == [3, 0, 0]
    where.wrote(1, np.array([3, 4]))
    where.copied(2, np.array([4]))
    assert where.held(rows).tolist() == [1, 2, 1]
    assert [(node, rows.tolist()) for node, rows in where.missing(2, rows)] == [(0, [2]), (1, [3])]
    where.lose(1)
    assert where.gone(rows).tolist() == [3]


def work(index: int, rows: list[int]) -> TrainingTask:
    count = len(rows)
    task = ClientTask(index, np.arange(count), (count,))
    return TrainingTask(task, 1, False, np.zeros(count), np.ones(count), np.array(rows), np.arange(count) + 100)


def test_a_node_gets_what_it_has_before_what_others_have():
    where = Whereabouts(200)
    where.add(), where.add()
    where.wrote(1, np.array([5, 6]))
    desk = Desk(where)
    desk.begin(TreeShape([1] * 4), row_bytes=100, sum_bytes=0)
    for index, rows in enumerate([[1, 2], [3, 4], [5, 6], [7, -1]]):
        desk.put(work(index, rows))
    assert desk.take(1, among=3).index == 2
    assert desk.take(1, among=3).index == 0  # it has none of them: the longest, whose rows will move
    assert desk.take(0, among=1).index == 1


def test_a_node_gets_neighbours_of_what_it_has():
    """Without states there is nothing else to choose by: a node adds up its tasks 0 to 3, the other 4 to 7."""
    where = Whereabouts(10)
    where.add(), where.add()
    desk = Desk(where)
    desk.begin(TreeShape([1] * 8), row_bytes=0, sum_bytes=100)
    for index in range(8):
        desk.put(work(index, [-1]))
    order = [(node, desk.take(node, among=8).index) for node in (0, 1, 1, 0, 1, 0, 0, 1)]
    assert order == [(0, 0), (1, 4), (1, 5), (0, 1), (1, 6), (0, 2), (0, 3), (1, 7)]


class PretendedHost:
    """node 0; `speed` steps a second."""

    node = 0

    def __init__(self, speed: float) -> None:
        self.speed, self.calls, self.free = speed, [], 0.0


def makespan(speeds: list[float], told: list[float], steps: np.ndarray) -> float:
    """Of single clients of so many steps; told: the speeds that the desk knows of."""
    where = Whereabouts(10)
    where.add()
    desk = Desk(where, steps)
    desk.begin(TreeShape([1] * len(steps)), row_bytes=0, sum_bytes=0)
    for index in range(len(steps)):
        desk.put(TrainingTask(ClientTask(index, np.array([index]), (1,)), 1, False, *[np.full(1, -1)] * 4))
    workers = [PretendedHost(speed) for speed in told]
    under_way: list[tuple[float, PretendedHost, Any]] = []

    def give(worker: PretendedHost, task: TrainingTask) -> None:
        call = SimpleNamespace(task=task)
        worker.calls.append(call)
        worker.free = max(worker.free, now) + steps[task.task.clients[0]] / speeds[workers.index(worker)]
        under_way.append((worker.free, worker, call))

    now = 0.0
    desk.hand_out(workers, give)
    while under_way:
        now, worker, call = under_way.pop(min(range(len(under_way)), key=lambda i: under_way[i][0]))
        worker.calls.remove(call)
        desk.hand_out(workers, give)
    assert not len(desk)
    return now


def test_slow_workers_take_nothing_that_the_others_would_wait_for():
    """Three workers, one of which has an eighth of the others' speed, and tasks of 1 to 40 steps, the longest first."""
    steps = np.arange(40, 0, -1)
    speeds = [1.0, 0.125, 1.0]
    ideal = steps.sum() / sum(speeds)
    assert makespan(speeds, speeds, steps) < 1.06 * ideal
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

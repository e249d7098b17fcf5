from __future__ import annotations

import pickle

import numpy as np
import pytest

from fedfleet.engine.cohorts import sampling
from fedfleet.engine.cohorts.tasks import (
    FEWEST_TASKS,
    MOST_TASKS,
    PackedTasks,
    TrainingTask,
    plan_tasks,
    steps_of,
    task_edges,
)
from fedfleet.engine.config.schema import Local


def test_a_cohort_is_distinct_ascending_and_counted():
    drawn = [sampling.sample(0, r, 50, 10) for r in range(1, 201)]
    assert all(len(set(c.tolist())) == 10 and (np.diff(c) > 0).all() for c in drawn)
    assert np.array_equal(drawn[3], sampling.sample(0, 4, 50, 10))
    assert not np.array_equal(drawn[3], sampling.sample(1, 4, 50, 10))
    # 2000 draws, 40 expected each, standard deviation 5.7; 5 of them either way
    counts = np.bincount(np.concatenate(drawn), minlength=50)
    assert counts.min() > 11
    assert counts.max() < 69


def test_a_cohort_does_not_cost_the_population():
    import tracemalloc

    tracemalloc.start()
    sampling.sample(0, 1, 10_000_000, 100)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000  # bytes; one int64 per client would be 80 MB


@pytest.mark.parametrize("block", [1, 3, 7, 100])
@pytest.mark.parametrize("size", [1, 9, 100])
def test_a_plan_has_every_client_once_the_longest_first(size, block):
    clients = np.sort(np.random.default_rng(0).choice(1000, size, replace=False))
    sizes = np.random.default_rng(1).integers(1, 200, size)
    local = Local(epochs=1, batch=10)
    tasks = plan_tasks(clients, sizes, local, block)
    assert [task.index for task in tasks] == list(range(len(tasks)))
    order = np.concatenate([task.clients for task in tasks])
    assert sorted(order.tolist()) == clients.tolist()
    steps = dict(zip(clients.tolist(), steps_of(sizes, local).tolist(), strict=True))
    lengths = [steps[int(c)] for c in order]
    assert lengths == sorted(lengths, reverse=True)
    for task in tasks:
        widths = np.diff([0, *task.cuts])
        assert widths.max() <= block
        assert task.cuts[-1] == len(task.clients)


def test_blocks_of_a_cohort_are_of_one_size_but_for_a_client():
    tasks = plan_tasks(np.arange(20), np.ones(20, dtype=int), Local(steps=1), 16)
    assert [len(task.clients) for task in tasks] == [10, 10]


@pytest.mark.parametrize("blocks", [1, 15, 16, 17, 100, 1000, 5000])
def test_tasks_shrink_towards_the_end(blocks):
    edges = task_edges(blocks)
    assert edges[0] == 0
    assert edges[-1] == blocks
    assert len(edges) - 1 <= max(FEWEST_TASKS, min(MOST_TASKS, blocks // 8))
    widths = np.diff(edges)
    assert (widths > 0).all()
    assert widths[0] <= max(1, round(0.14 * blocks))
    assert widths[-1] <= max(2, round(0.02 * blocks))


def test_packed_for_pickle_tasks_are_the_same():
    """Whole ones, and parts of some, as they are put again after a failure."""
    sampled = sampling.sample(0, 1, 300, 90)
    rng = np.random.default_rng(0)
    columns = (rng.integers(0, 9, 90), rng.random(90), rng.integers(-1, 500, 90), rng.permutation(500)[:90])
    tasks = plan_tasks(sampled, rng.integers(1, 50, 90), Local(epochs=1, batch=10), block=2)
    works = [TrainingTask.of(task, (3, False), sampled, columns) for task in tasks]
    works[1:2] = [works[1].subset(np.array([1])), works[1].subset(np.array([0]))]
    packed = pickle.loads(pickle.dumps(PackedTasks.of(works)))
    for place, work in enumerate(works):
        again = packed[place]
        assert (again.index, again.round, again.warm_start) == (work.index, 3, False)
        assert again.task.cuts == work.task.cuts
        for name in ("visits", "weights", "read", "write"):
            assert getattr(again, name).tolist() == getattr(work, name).tolist()
        assert again.task.clients.tolist() == work.task.clients.tolist()

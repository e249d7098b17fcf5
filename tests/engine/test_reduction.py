"""Sums in the order of a tree: whoever adds up what, in whatever order it comes, the bits are the same."""

from __future__ import annotations

import numpy as np
import pytest

from fedfleet.engine.cohorts.tasks import ClientTask, TrainingTask
from fedfleet.engine.reduction.round_totals import reduce_in_order
from fedfleet.engine.reduction.tree import PartialSum, TaskResult, TreeNode, TreeReducer, TreeShape


def recursive(values: list) -> np.ndarray:
    """The definition: the largest power of two below is the left branch."""
    if len(values) == 1:
        return values[0]
    half = 1 << (len(values) - 1).bit_length() - 1
    return recursive(values[:half]) + recursive(values[half:])


def values(count: int, seed: int = 0) -> list[np.ndarray]:
    """Numbers of very different sizes, of which another order gives another sum."""
    draw = np.random.default_rng(seed)
    return list(draw.standard_normal((count, 50)) * 10.0 ** draw.integers(-8, 8, (count, 50)))


def work(index: int, blocks: int) -> TrainingTask:
    task = ClientTask(index, np.arange(blocks), tuple(range(1, blocks + 1)))
    return TrainingTask(task, 1, False, *[np.zeros(blocks)] * 4)


BLOCKS = [[1], [3], [1, 1], [5, 3, 1], [1] * 11, [7, 4, 4, 2, 1, 1, 1], [16, 16, 9, 2]]


@pytest.mark.parametrize("blocks", BLOCKS, ids=str)
def test_any_cut_and_any_order(blocks):
    """Whole tasks from some, single blocks or branches from others, in random orders."""
    numbers = iter(values(sum(blocks)))
    tasks = [[next(numbers) for _ in range(count)] for count in blocks]
    expected = recursive([recursive(task) for task in tasks])
    shape, draw = TreeShape(blocks), np.random.default_rng(1)
    for _ in range(30):
        results: list[TaskResult | PartialSum] = []
        for index, task in enumerate(tasks):
            whole = bool(draw.integers(2))
            facts = {"loss": float(sum(map(abs, recursive(task))))}
            results.append(TaskResult(index, [recursive(task)] if whole else None, facts, {"id": np.array([index])}))
            level = int(draw.integers(0, 3))
            for place in range(0 if whole else -(-len(task) // (1 << level))):
                below = task[place << level : (place + 1) << level]
                results.append(
                    PartialSum(shape.inside(index, TreeNode(min(level, shape.depth), place)), [recursive(below)])
                )
        draw.shuffle(results)  # type: ignore[arg-type]
        totals = reduce_in_order([work(index, count) for index, count in enumerate(blocks)], results)
        assert totals.leaves[0].tobytes() == expected.tobytes()
        assert totals.clients["id"].tolist() == list(range(len(blocks)))
        losses = [recursive([np.array(float(sum(map(abs, recursive(task)))))]) for task in tasks]
        assert totals.facts["loss"] == recursive(losses)


def test_another_order_would_be_another_sum():
    """What these tests rest on."""
    numbers = values(16)
    assert sum(numbers[1:], numbers[0]).tobytes() != recursive(numbers).tobytes()


def test_a_task_without_clients_adds_nothing():
    one, other = values(2)
    works = [work(index, 1) for index in range(3)]
    results = [TaskResult(0, [one], {}), TaskResult.nothing(1, (4,)), TaskResult(2, [other], {})]
    totals = reduce_in_order(works, reversed(results))
    assert totals.leaves[0].tobytes() == (one + other).tobytes()
    assert totals.dropped == (4,)


def test_what_came_from_elsewhere_is_left_as_it_was():
    """Results may lie in memory that is not ours: read-only, or a view that others write to."""
    mine = values(4)
    lent = [value.copy() for value in mine]
    for value in lent:
        value.flags.writeable = False
    reduce_in_order(
        [work(index, 1) for index in range(4)], [TaskResult(i, [value], {}) for i, value in enumerate(lent)]
    )
    views = np.stack(mine)
    reduce_in_order([work(index, 1) for index in range(4)], [TaskResult(i, [views[i]], {}) for i in range(4)])
    for value, view, expected in zip(lent, views, mine, strict=True):
        assert value.tobytes() == view.tobytes() == expected.tobytes()


def test_neighbours_that_cannot_be_added_stay_apart():
    """As those on two nodes do until they are brought."""

    shape = TreeShape([1] * 4)
    fold = TreeReducer(shape, lambda left, right: (left[0], left[1] + right[1]) if left[0] == right[0] else None)
    for index, node in enumerate("aabb"):
        fold.put(shape.task(index), (node, 1))
    assert fold.parts == {TreeNode(1, 0): ("a", 2), TreeNode(1, 1): ("b", 2)}
    fold = TreeReducer(shape, lambda left, right: (left[0], left[1] + right[1]) if left[0] == right[0] else None)
    for index, node in enumerate("abab"):
        fold.put(shape.task(index), (node, 1))
    assert len(fold.parts) == 4

"""Sums in the order of a tree: the bits do not depend on which process adds which parts, and in which order they
arrive."""

from __future__ import annotations

import numpy as np
import pytest

from fedfleet.engine.cohorts.tasks import ClientTask, TrainingTask, tree_shape
from fedfleet.engine.reduction.tree import (
    PartialSum,
    Sums,
    TaskResult,
    TreeNode,
    TreeReducer,
    TreeShape,
    add_leaves,
    add_sparse,
    reduce_in_order,
)


def recursive(values: list) -> np.ndarray:
    """The sum by its definition: the left branch has the largest power of two that is smaller than the number of
    values."""
    if len(values) == 1:
        return values[0]
    half = 1 << (len(values) - 1).bit_length() - 1
    return recursive(values[:half]) + recursive(values[half:])


def values(count: int, seed: int = 0) -> list[np.ndarray]:
    """Numbers of very different sizes, whose sum depends on the order."""
    draw = np.random.default_rng(seed)
    return list(draw.standard_normal((count, 50)) * 10.0 ** draw.integers(-8, 8, (count, 50)))


def work(index: int, blocks: int) -> TrainingTask:
    task = ClientTask(index, np.arange(blocks), tuple(range(1, blocks + 1)))
    return TrainingTask(task, 1, False, *[np.zeros(blocks)] * 5)


BLOCKS = [[1], [3], [1, 1], [5, 3, 1], [1] * 11, [7, 4, 4, 2, 1, 1, 1], [16, 16, 9, 2]]


@pytest.mark.parametrize("blocks", BLOCKS, ids=str)
def test_any_cut_and_any_order(blocks):
    """Some results are whole tasks, others are single blocks or branches, and they come in random order."""
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
                branch = work(index, len(task))._replace(branch=TreeNode(min(level, shape.depth), place))
                results.append(PartialSum(shape.node_of(branch), [recursive(below)]))
        draw.shuffle(results)  # type: ignore[arg-type]
        totals = reduce_in_order(shape, results)
        assert totals.leaves[0].tobytes() == expected.tobytes()
        assert totals.clients["id"].tolist() == list(range(len(blocks)))
        losses = [recursive([np.array(float(sum(map(abs, recursive(task)))))]) for task in tasks]
        assert totals.facts["loss"] == recursive(losses)


def test_another_order_would_be_another_sum():
    """Otherwise the tests above could not fail."""
    numbers = values(16)
    assert sum(numbers[1:], numbers[0]).tobytes() != recursive(numbers).tobytes()


def test_a_task_without_clients_adds_nothing():
    one, other = values(2)
    works = [work(index, 1) for index in range(3)]
    results = [
        TaskResult(0, [one], {}),
        TaskResult.nothing(works[1])._replace(dropped={0: 4}),
        TaskResult(2, [other], {}),
    ]
    totals = reduce_in_order(tree_shape(works), reversed(results))
    assert totals.leaves[0].tobytes() == (one + other).tobytes()
    assert totals.dropped == (4,)


def test_halves_of_a_task_are_added_for_each_of_their_updates():
    """The first half has clients for the updates 3 and 4 in block 0, the second one for the update 3 in both blocks."""
    one, other, more, last = values(4)
    left = TaskResult(0, [], apart={(0, 3): Sums([one.copy()], {"loss": 1.0}), (0, 4): Sums([other], {"loss": 2.0})})
    right = TaskResult(0, [], apart={(0, 3): Sums([more], {"loss": 4.0}), (1, 3): Sums([last], {"loss": 8.0})})
    found = TaskResult.join([left, right]).apart
    assert {target: sums.facts["loss"] for target, sums in found.items()} == {(0, 3): 5.0, (0, 4): 2.0, (1, 3): 8.0}
    expected = {(0, 3): one + more, (0, 4): other, (1, 3): last}
    assert all(found[target].leaves[0].tobytes() == value.tobytes() for target, value in expected.items())


def test_what_came_from_elsewhere_is_left_as_it_was():
    """Results may be in memory of another process: read-only, or a view of memory that others write to."""
    mine = values(4)
    lent = [value.copy() for value in mine]
    for value in lent:
        value.flags.writeable = False
    shape = TreeShape([1] * 4)
    reduce_in_order(shape, [TaskResult(i, [value], {}) for i, value in enumerate(lent)])
    views = np.stack(mine)
    reduce_in_order(shape, [TaskResult(i, [views[i]], {}) for i in range(4)])
    for value, view, expected in zip(lent, views, mine, strict=True):
        assert value.tobytes() == view.tobytes() == expected.tobytes()


def test_sums_that_are_no_neighbours_stay_apart():
    """This is the case for sums of a node whose neighbours in the tree are on another node."""
    shape, (one, other, third) = TreeShape([1] * 4), values(3)
    fold = TreeReducer(shape, lambda left, right: left + right)
    fold.put(TreeNode(0, 0), one)
    fold.put(TreeNode(0, 2), other)
    assert list(fold.parts) == [TreeNode(0, 0), TreeNode(0, 2)]
    fold.put(TreeNode(0, 3), third)
    assert list(fold.parts) == [TreeNode(0, 0), TreeNode(1, 1)]
    assert fold.parts[TreeNode(1, 1)].tobytes() == (other + third).tobytes()


@pytest.mark.parametrize("blocks", BLOCKS, ids=str)
def test_blocks_that_are_not_there_are_left_out(blocks):
    """The sum over some blocks is that of the whole tree in which the others have no clients."""
    draw, shape = np.random.default_rng(3), TreeShape(blocks)
    places = [(task << shape.depth) + block for task, count in enumerate(blocks) for block in range(count)]
    for share in (0.2, 0.5, 0.9):
        there = {
            place: [value] for place, value in zip(places, values(len(places)), strict=True) if draw.random() < share
        }
        there = there or {places[-1]: values(1)}
        whole = TreeReducer(shape, lambda left, right: add_leaves([*map(np.array, left)], right))
        for place in places:
            whole.put(TreeNode(0, place), there.get(place, []))
        found = add_sparse(there, lambda left, right: [left[0] + right[0]])
        np.testing.assert_array_equal(found[0], whole.total()[0])

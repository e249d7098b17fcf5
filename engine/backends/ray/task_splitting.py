"""Splits tasks into branches of their trees if there are many workers for few tasks.

Tasks are cut by the configuration, never by the number of workers, and a task's blocks are added in the order of a tree
(reduction/tree.py): that is why the bits do not depend on workers. So a branch of that tree may run anywhere by itself.
Each branch costs a message of the model's length, so tasks are split only if workers would be idle otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...cohorts.tasks import TrainingTask
from ...reduction.tree import TreeNode, TreeShape

FINE = 10
"""A task with more than 1/FINE of a worker's share of the phase is split into branches of about this size."""


def split_tasks(tasks: Sequence[Any], workers: int, steps: np.ndarray) -> list[Any]:
    """The tasks of a phase, of which those that are large for this number of workers are split. steps: (N,) of each
    client."""
    if not all(isinstance(task, TrainingTask) for task in tasks):
        return list(tasks)
    weights = [int(steps[task.clients].sum()) for task in tasks]
    share = sum(weights) / max(1, workers)
    found: list[Any] = []
    for task, weight in zip(tasks, weights, strict=True):
        found += [task] if weight * FINE <= share else branches_of(task, steps, share / FINE)
    return found


def branches_of(task: TrainingTask, steps: np.ndarray, most: float) -> list[TrainingTask]:
    """The task in branches of at most `most` steps; a single block is never split."""
    cuts = (0, *task.cuts)
    blocks = len(cuts) - 1
    done = np.concatenate([[0], np.cumsum(steps[task.clients])])

    def below(node: TreeNode) -> list[TreeNode]:
        begin, end = blocks_below(node, blocks)
        if begin >= end:
            return []
        if end - begin == 1 or done[cuts[end]] - done[cuts[begin]] <= most:
            return [node]
        return below(TreeNode(node.level - 1, 2 * node.place)) + below(TreeNode(node.level - 1, 2 * node.place + 1))

    found = below(TreeShape([blocks]).root)
    if len(found) == 1:
        return [task]
    return [task.blocks(node, *blocks_below(node, blocks)) for node in found]


def blocks_below(node: TreeNode, blocks: int) -> tuple[int, int]:
    """(first, end) of a task's blocks that lie below a node of its tree."""
    return node.place << node.level, min((node.place + 1) << node.level, blocks)

"""What has come of a phase's tasks on several nodes: results, sums that are held there, and what must be run again."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from ...cohorts.tasks import TrainingTask
from ...reduction.round_totals import tree_shape
from ...reduction.tree import PartialSum, TaskResult, TreeNode, TreeShape
from ..base import Failure
from .cluster_nodes import Given, Site
from .partial_sums import Far, Held
from .task_splitting import Joiner, Piece, key, place_of

Key = tuple[int, int]


class Phase:
    def __init__(self) -> None:
        self.over: deque[tuple[Any, TaskResult | Failure]] = deque()  # results that nobody has asked for yet
        self.held, self.joiner = Held(), Joiner()
        self.late: set[int] = set()  # numbers of tasks that were put after the first result
        self.done: dict[Key, tuple[Any, int]] = {}  # (task or piece, the node that has its fresh rows)
        self.again: set[Key] = set()  # those that are run once more, for their rows
        self.unsummed: set[Key] = set()  # of those, they whose sums are lost too

    def clear(self) -> None:
        for kept in (self.over, self.joiner, self.late, self.done, self.again, self.unsummed):
            kept.clear()
        self.held.begin(TreeShape([1]))

    def begin(self, tasks: Sequence[Any]) -> TreeShape:
        """Of its tree."""
        self.held.begin(tree_shape(tasks))
        return self.held.shape

    # --- results ------------------------------------------------------------------------------------------------------
    def summed(self, site: Site, given: Given, result: TaskResult) -> TaskResult:
        """The result; its sums are held until all of the phase are there, but for those of late tasks. RayError where
        they are lost."""
        task = given.task
        if isinstance(task, Piece) and task.index in self.joiner.failed:
            return result
        if key(task) in self.again and key(task) not in self.unsummed:
            return result
        if isinstance(task, TrainingTask) and task.index in self.late:
            leaves = self.held.brought(Far(site, given.sums)) if result.leaves is None else result.leaves
            return result._replace(leaves=leaves)
        self.held.put(place_of(task, self.held.shape), site, result.leaves, given.sums)
        return result._replace(leaves=None)

    def ended(self, task: Any, result: Any) -> bool:
        """False: it must be put again."""
        if key(task) in self.again:
            if isinstance(result, Failure):
                return False  # it went well before
            self.again.discard(key(task))
            self.unsummed.discard(key(task))
        elif not isinstance(task, Piece):
            self.over.append((task, result))
        elif (joined := self.joiner.add(task, result)) is not None:
            if isinstance(result, Failure):
                self.held.forget_task(task.index)
            self.over.append(joined)
        return True

    def rest(self) -> Iterator[PartialSum]:
        return self.held.rest()

    # --- losses -------------------------------------------------------------------------------------------------------
    def lose(self, site: Site, rows: bool) -> list[Any]:
        """The tasks to put again for what was on a node; rows: clients keep states."""
        theirs = [task for task, number in self.done.values() if number == site.number]
        return self._redo(self.held.lose(site), theirs if rows else [])

    def lose_sums(self, places: Sequence[TreeNode]) -> list[Any]:
        """The same for sums that cannot be brought though their node is there."""
        gone = [at for at in places if at in self.held.fold.parts]
        self.held.drop(gone)
        return self._redo(gone, [])

    def _redo(self, lost: list[TreeNode], others: Sequence[Any]) -> list[Any]:
        shape = self.held.shape
        summed = [task for task, _ in self.done.values() if any(place_of(task, shape).within(at) for at in lost)]
        self.unsummed |= {key(task) for task in summed}
        tasks = {key(task): task for task in [*others, *summed]}
        self.again |= set(tasks)
        return list(tasks.values())

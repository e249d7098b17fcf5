"""The worker pool of one node: the end of a phase."""

from __future__ import annotations

from collections import deque

from fedfleet.engine.backends.ray.worker_pool import Finished, WorkerPool
from fedfleet.engine.reduction.tree import TaskResult


class PoolAtItsLastResult(WorkerPool):
    """A pool in which all tasks have ended and one result has not been taken. No worker will send anything more."""

    def __init__(self) -> None:
        self.waiting, self.under_way, self.orders = deque(), {}, []
        self.finished = deque([Finished(None, TaskResult(0, None, {}), None)])

    def listen(self, also: int | None = None) -> None:
        raise AssertionError("the pool waits for a worker, though every task has ended")


def test_a_phase_ends_with_its_last_result():
    """If the pool listened once more, it would wait for half a second in every phase."""
    outcomes = list(PoolAtItsLastResult()._outcomes(release=False))
    assert [outcome.index for outcome in outcomes] == [0]

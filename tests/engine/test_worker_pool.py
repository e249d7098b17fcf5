"""The worker pool of one node: the end of a phase, and the memory of its orders."""

from __future__ import annotations

from collections import deque

import numpy as np

from fedfleet.engine.backends.ray import worker_pool
from fedfleet.engine.backends.ray.worker_pool import Finished, IssuedOrder, Woken, WorkerPool
from fedfleet.engine.backends.ray.worker_process import order_address
from fedfleet.engine.reduction.tree import TaskResult


class PoolAtItsLastResult(WorkerPool):
    """A pool in which all tasks have ended and one result has not been taken. No worker will send anything more."""

    def __init__(self) -> None:
        self.waiting, self.under_way, self.orders, self.more = deque(), {}, [], None
        self.finished = deque([Finished(None, TaskResult(0, None, {}), None)])

    def listen(self, also: int | None = None) -> None:
        raise AssertionError("the pool waits for a worker, though every task has ended")


def test_a_phase_ends_with_its_last_result():
    """If the pool listened once more, it would wait for half a second in every phase."""
    outcomes = list(PoolAtItsLastResult()._outcomes(release=False))
    assert [outcome.index for outcome in outcomes] == [0]


def test_no_order_is_written_over_one_that_a_worker_may_read(monkeypatch):
    """Workers end their orders late and in any order, and the memory is used again from its begin."""
    monkeypatch.setattr(worker_pool, "ORDERS_BYTES", 5000)
    draw, pool = np.random.default_rng(0), PoolAtItsLastResult()
    pool.orders_end, worker = 0, object()
    kept: deque[Woken] = deque()
    pool.working = {worker: kept}  # pyright: ignore[reportAttributeAccessIssue]
    begins = []
    for number in range(2000):
        size = int(draw.integers(1, 900))
        begin = pool._place_of_order(size)
        for held in kept:
            first, end = held.order.bytes
            assert end <= begin or begin + size <= first
        kept.append(Woken(worker, IssuedOrder(number, order_address(begin, size), ()), 0.0))  # pyright: ignore[reportArgumentType]
        pool.orders_end = begin + size
        begins.append(begin)
        while kept and draw.random() < 0.4 + 0.1 * len(kept):
            del kept[int(draw.integers(len(kept)))]
    assert begins.count(0) > 50
    assert max(begins) < 50_000

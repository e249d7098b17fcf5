"""Who takes part in a round, and how the cohort is cut into blocks and tasks.

Everything here depends on the configuration and the round alone, never on workers: that is why one worker, eight
workers and the in-process backend give the same bits. A block is what runs at once (vectorised); a task is a run of
consecutive blocks that one worker is handed at a time and whose sums come back as one.
"""

from __future__ import annotations

import numpy as np

from ...workloads import counted
from ...workloads.base import ClientIndex
from ..config.schema import Federation, Local
from .tasks import ClientTask, plan_tasks


def philox(*parts: int | str) -> np.random.Generator:
    """A numpy generator of its own for one counted draw."""
    return np.random.Generator(np.random.Philox(key=int(counted.key(*parts)) & (1 << 64) - 1))


def sample(seed: int, round: int, clients: int, cohort: int) -> np.ndarray:
    """(S,) distinct client numbers, ascending: uniform without replacement."""
    if cohort == clients:
        return np.arange(clients)
    drawn = philox(seed, "cohort", round).choice(clients, cohort, replace=False, shuffle=False)
    return np.sort(drawn.astype(np.int64))


class CohortSampler:
    """Who takes part in which round, in which tasks: `drawn` ahead, while workers are at the round before, or at
    need."""

    def __init__(self, seed: int, plan: Federation, client_index: ClientIndex, block: int) -> None:
        self.seed, self.plan, self.client_index, self.block = seed, plan, client_index, block
        self.last: tuple[int, tuple[np.ndarray, list[ClientTask]]] | None = None

    def drawn(self, round: int) -> tuple[np.ndarray, list[ClientTask]]:
        """((S,) clients, ascending; their tasks)."""
        if self.last is None or self.last[0] != round:
            sampled = sample(self.seed, round, self.plan.clients, self.plan.cohort)
            self.last = round, (sampled, self._tasks(sampled, self.plan.local))
        return self.last[1]

    def everyone(self) -> tuple[np.ndarray, list[ClientTask]]:
        """The same of a pass over all clients, an epoch each."""
        clients = np.arange(self.plan.clients)
        return clients, self._tasks(clients, Local(epochs=1, batch=self.plan.local.batch))

    def _tasks(self, clients: np.ndarray, local: Local) -> list[ClientTask]:
        return plan_tasks(clients, self.client_index.sizes_of(clients), local, self.block)

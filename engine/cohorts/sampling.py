"""Which clients take part in a round, in which tasks.

Everything here depends only on the configuration and the round, never on workers. That is why one worker, eight workers
and the in-process backend give the same bits.
"""

from __future__ import annotations

import numpy as np

from ...workloads import counted
from ...workloads.base import ClientIndex
from ..config.schema import Federation, Local
from .tasks import ClientTask, plan_tasks


def philox(*parts: int | str) -> np.random.Generator:
    """A numpy generator whose key follows from the parts: one generator for each counted draw."""
    return np.random.Generator(np.random.Philox(key=int(counted.key(*parts)) & (1 << 64) - 1))


def sample(seed: int, round: int, clients: int, cohort: int) -> np.ndarray:
    """(S,) distinct client numbers in ascending order, drawn uniformly without replacement."""
    if cohort == clients:
        return np.arange(clients)
    drawn = philox(seed, "cohort", round).choice(clients, cohort, replace=False, shuffle=False)
    return np.sort(drawn.astype(np.int64))


class CohortSampler:
    """The cohort of every round, cut into tasks.

    A round may be drawn ahead, while workers run the round before; the last one that was drawn is remembered.
    """

    def __init__(self, seed: int, federation: Federation, client_index: ClientIndex, block: int) -> None:
        """`block`: the number of clients in a block."""
        self.seed, self.federation, self.client_index, self.block = seed, federation, client_index, block
        self.last: tuple[int, tuple[np.ndarray, list[ClientTask]]] | None = None

    def cohort(self, round: int) -> tuple[np.ndarray, list[ClientTask]]:
        """((S,) client numbers in ascending order, their tasks)."""
        if self.last is None or self.last[0] != round:
            sampled = sample(self.seed, round, self.federation.clients, self.federation.cohort)
            self.last = round, (sampled, self._tasks(sampled, self.federation.local))
        return self.last[1]

    def all_clients(self) -> tuple[np.ndarray, list[ClientTask]]:
        """The same for a pass over all clients, one epoch each."""
        clients = np.arange(self.federation.clients)
        return clients, self._tasks(clients, Local(epochs=1, batch=self.federation.local.batch))

    def _tasks(self, clients: np.ndarray, local: Local) -> list[ClientTask]:
        return plan_tasks(clients, self.client_index.sizes_of(clients), local, self.block)

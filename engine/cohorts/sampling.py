"""Which clients take part in a round, in which tasks.

Everything here depends only on the configuration and the round, never on workers. That is why one worker, eight workers
and the in-process backend give the same bits.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from ...workloads import counted
from ...workloads.client_index import ClientIndex
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


def sample_poisson(seed: int, round: int, clients: int, rate: float) -> np.ndarray:
    """(m,) ascending client numbers, each of which is drawn with probability `rate`, independently of the others.

    Their number is drawn first, so that the cost does not depend on the number of clients."""
    return sample(seed, round, clients, poisson_size(seed, round, clients, rate))


def poisson_size(seed: int, round: int, clients: int, rate: float) -> int:
    """m of `sample_poisson`."""
    return int(philox(seed, "cohort size", round).binomial(clients, rate))


@lru_cache(1)
def _groups(seed: int, clients: int, separation: int) -> list[np.ndarray]:
    """The groups of clients that take turns, each in ascending order; cached, since every round needs one of them."""
    permuted = philox(seed, "groups").permutation(clients)
    return [np.sort(permuted[group::separation]) for group in range(separation)]


def sample_cyclic(seed: int, round: int, clients: int, cohort: int, separation: int) -> np.ndarray:
    """(m,) ascending client numbers from the group whose turn it is: all of it if all groups have `cohort` clients,
    else each with the same probability, so that `cohort` is the mean of m."""
    group = _groups(seed, clients, separation)[(round - 1) % separation]
    if cohort * separation == clients:
        return group
    return group[sample_poisson(seed, round, len(group), cohort * separation / clients)]


def sample_cohort(seed: int, round: int, federation: Federation) -> np.ndarray:
    """(m,) distinct client numbers in ascending order: the cohort of a round, in the run's way of sampling."""
    clients, cohort = federation.clients, federation.cohort
    if federation.sampling == "poisson":
        return sample_poisson(seed, round, clients, cohort / clients)
    if federation.sampling == "cyclic" and federation.separation is not None:
        return sample_cyclic(seed, round, clients, cohort, federation.separation)
    return sample(seed, round, clients, cohort)


def cohort_sizes(seed: int, federation: Federation) -> frozenset[int]:
    """The numbers of clients in the rounds of a run."""
    sampling, rounds = federation.sampling, federation.rounds
    return _cohort_sizes(seed, rounds, federation.clients, federation.cohort, sampling, federation.separation or 1)


@lru_cache(8)
def _cohort_sizes(seed: int, rounds: int, clients: int, cohort: int, sampling: str, separation: int) -> frozenset[int]:
    if sampling == "fixed" or (sampling == "cyclic" and cohort * separation == clients):
        return frozenset([cohort])
    groups = [len(range(first, clients, separation)) for first in range(separation)]
    rate = cohort * separation / clients
    return frozenset(
        poisson_size(seed, round, groups[(round - 1) % separation], rate) for round in range(1, rounds + 1)
    )


def draws_somebody(seed: int, federation: Federation, rounds: int) -> bool:
    """Whether any of these rounds has a client."""
    return federation.sampling == "fixed" or any(
        len(sample_cohort(seed, round, federation)) for round in range(1, rounds + 1)
    )


class CohortSampler:
    """The cohort of every round, cut into tasks.

    A round may be drawn ahead, while workers run the round before; the last one that was drawn is remembered.
    """

    def __init__(self, seed: int, federation: Federation, client_index: ClientIndex, block: int) -> None:
        """`block`: the number of clients in a block."""
        self.seed, self.federation, self.client_index, self.block = seed, federation, client_index, block
        self.last: tuple[int, tuple[np.ndarray, list[ClientTask]]] | None = None

    def cohort(self, round: int) -> tuple[np.ndarray, list[ClientTask]]:
        """((S,) client numbers in ascending order, their tasks). Both are empty in a round without clients."""
        if self.last is None or self.last[0] != round:
            sampled = sample_cohort(self.seed, round, self.federation)
            self.last = round, (sampled, self._tasks(sampled, self.federation.local))
        return self.last[1]

    def all_clients(self) -> tuple[np.ndarray, list[ClientTask]]:
        """The same for a pass over all clients, one epoch each."""
        clients = np.arange(self.federation.clients)
        return clients, self._tasks(clients, Local(epochs=1, batch=self.federation.local.batch))

    def _tasks(self, clients: np.ndarray, local: Local) -> list[ClientTask]:
        if not len(clients):
            return []
        return plan_tasks(clients, self.client_index.sizes_of(clients), local, self.block)

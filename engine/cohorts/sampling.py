"""Cohorts that follow from the seed and the number of the round alone.

They never depend on workers. That is why one worker, eight workers and the in-process backend give the same bits.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from ...workloads import counted


def philox(*parts: int | str) -> np.random.Generator:
    """A numpy generator whose key follows from the parts: one generator for each counted draw."""
    return np.random.Generator(np.random.Philox(key=int(counted.key(*parts)) & (1 << 64) - 1))


def sample(seed: int, round: int, clients: int, cohort: int) -> np.ndarray:
    """(S,) distinct client numbers in ascending order, drawn uniformly without replacement."""
    if cohort == clients:
        return np.arange(clients)
    drawn = philox(seed, "cohort", round).choice(clients, cohort, replace=False, shuffle=False)
    return np.sort(drawn.astype(np.int64))


def binomial_size(seed: int, round: int, clients: int, rate: float) -> int:
    """How many of these clients a round has if each takes part with probability `rate`, independently of the others."""
    return int(philox(seed, "cohort size", round).binomial(clients, rate))


@lru_cache(8)
def binomial_sizes(seed: int, rounds: int, groups: tuple[int, ...], rate: float) -> frozenset[int]:
    """The numbers of clients in the rounds of a run. groups: the sizes of the groups that take turns."""
    return frozenset(
        binomial_size(seed, round, groups[(round - 1) % len(groups)], rate) for round in range(1, rounds + 1)
    )


@lru_cache(1)
def groups_in_turns(seed: int, clients: int, separation: int) -> list[np.ndarray]:
    """The groups of clients that take turns, each in ascending order; cached, since every round needs one of them."""
    permuted = philox(seed, "groups").permutation(clients)
    return [np.sort(permuted[group::separation]) for group in range(separation)]

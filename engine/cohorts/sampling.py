"""Who takes part in a round, and how the cohort is cut into blocks and tasks.

Everything here depends on the configuration and the round alone, never on hosts: that is why one host, eight hosts and
the in-process backend give the same bits. A block is what runs at once (vectorised); a task is a run of consecutive
blocks that one host is handed at a time and whose sums come back as one.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ...workloads import counted
from ...workloads.base import Parts
from ..config.schema import Federation, Local

FEWEST, MOST = 20, 128
"""Tasks a round, where there are blocks enough: a task costs a message as long as the model, whatever it holds."""


class ClientTask(NamedTuple):
    """Consecutive blocks: `clients` in order, cut after every position in `cuts`."""

    index: int
    clients: np.ndarray  # (c,) int64
    cuts: tuple[int, ...]  # ends of blocks, the last is c


def philox(*parts: int | str) -> np.random.Generator:
    """A numpy generator of its own for one counted draw."""
    return np.random.Generator(np.random.Philox(key=int(counted.key(*parts)) & (1 << 64) - 1))


def sample(seed: int, round: int, clients: int, cohort: int) -> np.ndarray:
    """(S,) distinct client numbers, ascending: uniform without replacement."""
    if cohort == clients:
        return np.arange(clients)
    drawn = philox(seed, "cohort", round).choice(clients, cohort, replace=False, shuffle=False)
    return np.sort(drawn.astype(np.int64))


def steps_of(sizes: np.ndarray, local: Local) -> np.ndarray:
    """(c,) local steps of clients with so many examples."""
    if local.epochs is None:
        return np.full(len(sizes), local.steps, dtype=np.int64)
    return local.epochs * -(-sizes // local.batch)


def plan(clients: np.ndarray, sizes: np.ndarray, local: Local, block: int) -> list[ClientTask]:
    """Blocks of equal size, but for one client more or less; the longest first, so that no host is left with one at
    the end and clients of like length share a block."""
    steps = steps_of(sizes, local)
    ordered = clients[np.lexsort((clients, -steps))]
    blocks = np.array_split(ordered, -(-len(ordered) // block))
    edges = task_edges(len(blocks))
    tasks = []
    for index, (begin, end) in enumerate(pairwise(edges)):
        members = blocks[begin:end]
        cuts = np.cumsum([len(member) for member in members])
        tasks.append(ClientTask(index, np.concatenate(members), tuple(int(cut) for cut in cuts)))
    return tasks


def task_edges(blocks: int) -> list[int]:
    """Where tasks begin among so many blocks: a block each if they are few, else a quarter of the tasks with half of
    the blocks, a quarter with half of the rest, and so on, so that hosts that pull them finish together."""
    count = min(max(FEWEST, blocks // 8), MOST)
    if blocks <= count:
        return list(range(blocks + 1))
    shares = np.cumsum(np.repeat([8, 4, 2, 1], count // 4))
    return sorted({0, *np.rint(shares / shares[-1] * blocks).astype(int).tolist()})


class CohortSampler:
    """Who takes part in which round, in which tasks: `drawn` ahead, while hosts are at the round before, or at need."""

    def __init__(self, seed: int, plan: Federation, parts: Parts, block: int) -> None:
        self.seed, self.plan, self.parts, self.block = seed, plan, parts, block
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
        return plan(clients, self.parts.sizes_of(clients), local, self.block)


def auto_block(parameters: int, cohort: int, device: str) -> int:
    """Clients to vectorise over where the experiment leaves it open and nothing was measured.

    On a processor vectorising pays while a step's cost is the dispatch of its operations, which
    `benchmarks/blocks.py` finds to be so below 50,000 parameters; convolutions and large layers run faster one client
    at a time. A GPU needs many clients to be busy at all.
    """
    wanted = 64 if device == "cuda" else 16 if parameters < 50_000 else 1
    return min(cohort, wanted)

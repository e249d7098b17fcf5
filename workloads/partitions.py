"""Partitions of the training rows over the clients: iid, by shards, and by Dirichlet proportions. They give every row
to exactly one client, and the rows of a client are in random order."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from . import counted
from .base import ClientIndex, Partition


def enough(rows: int, clients: int, each: int = 1) -> None:
    """Raise ValueError unless there are `each` rows for every client."""
    if clients < 1:
        raise ValueError(f"clients >= 1 must hold, got clients={clients}; raise federation.clients")
    if rows < clients * each:
        raise ValueError(
            f"rows >= clients * {each} must hold so that each client has {each}, got rows={rows}, clients={clients}; "
            "lower federation.clients"
        )


def in_random_order(clients: list[np.ndarray], random: np.random.Generator) -> ClientIndex:
    """The index of `clients`, the rows of each client, with the rows of each client in random order."""
    return ClientIndex.of([random.permutation(rows) for rows in clients])


def repaired(rows: list[np.ndarray], minimum: int) -> list[np.ndarray]:
    """The rows of each client after every client with fewer than `minimum` rows has got the missing ones.

    Each missing row is the last row of the client that is largest at that moment (the first of equals). There are
    enough rows, so the largest client always has more than `minimum`. rows: the rows of each client.
    """
    sizes = np.array([len(own) for own in rows])
    added = {}
    for small in np.flatnonzero(sizes < minimum):
        added[small] = []
        for _ in range(minimum - sizes[small]):
            large = sizes.argmax()
            sizes[large] -= 1
            added[small].append(rows[large][sizes[large]])
    kept = [own[:size] for own, size in zip(rows, sizes, strict=True)]
    return [np.append(own, added[i]).astype(np.int64) if i in added else own for i, own in enumerate(kept)]


@dataclass(frozen=True)
class Iid(Partition):
    """All rows in random order, in equal parts; sizes differ by at most one."""

    def deal(self, labels: np.ndarray, clients: int, seed: int) -> ClientIndex:
        enough(len(labels), clients)
        rows = counted.numpy_generator(seed, "partition", "iid").permutation(len(labels))
        return ClientIndex.equal(rows, clients)


@dataclass(frozen=True)
class Shards(Partition):
    """Rows are sorted by label and cut into clients * per_client shards; each client gets `per_client` random shards.
    McMahan et al. 2017.

    A client has at most `per_client` labels, plus one for each border between two classes inside its shards.
    """

    per_client: int = 2

    def __post_init__(self) -> None:
        if self.per_client < 1:
            raise ValueError(f"per_client >= 1 must hold, got per_client={self.per_client}")

    def deal(self, labels: np.ndarray, clients: int, seed: int) -> ClientIndex:
        enough(len(labels), clients, self.per_client)
        random = counted.numpy_generator(seed, "partition", "shards")
        rows = random.permutation(len(labels))
        shards = np.array_split(rows[np.argsort(labels[rows], kind="stable")], clients * self.per_client)
        chosen = random.permutation(len(shards)).reshape(clients, self.per_client)
        return in_random_order([np.concatenate([shards[shard] for shard in own]) for own in chosen], random)


@dataclass(frozen=True)
class Dirichlet(Partition):
    """The rows of each class are divided among the clients by proportions drawn from Dirichlet(beta). The smaller beta
    is, the more skewed the labels are. Hsu et al. 2019; Li et al. 2022 (NIID-Bench).

    `cap`: the rule of NIID-Bench that a client with 1 / clients of all rows gets no row of the next class. `minimum`:
    the least number of rows of a client. NIID-Bench draws everything again until each client has so many, which may
    never happen (100 clients, 1,400 rows, beta 0.1). Here the first draw is kept, and the missing rows are taken, one
    by one, from the client that is largest at that moment. This always ends, moves as few rows as possible, and changes
    nothing if every client has enough rows.
    """

    beta: float = 0.1
    minimum: int = 1
    cap: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.beta < np.inf:
            raise ValueError(f"0 < beta < infinity must hold, got beta={self.beta}; for equal shares choose iid")
        if self.minimum < 1:
            raise ValueError(f"minimum >= 1 must hold, got minimum={self.minimum}")

    def deal(self, labels: np.ndarray, clients: int, seed: int) -> ClientIndex:
        enough(len(labels), clients, self.minimum)
        random = counted.numpy_generator(seed, "partition", "dirichlet")
        owned: list[list[np.ndarray]] = [[] for _ in range(clients)]
        sizes = np.zeros(clients, dtype=np.int64)
        for label in np.unique(labels):
            rows = random.permutation(np.flatnonzero(labels == label))
            share = self._shares(random, sizes, len(labels) / clients)
            cuts = np.round(np.cumsum(share)[:-1] * len(rows)).astype(np.int64)
            for client, piece in enumerate(np.split(rows, cuts)):
                owned[client].append(piece)
                sizes[client] += len(piece)
        return ClientIndex.of(repaired([random.permutation(np.concatenate(own)) for own in owned], self.minimum))

    def _shares(self, random: np.random.Generator, sizes: np.ndarray, full: float) -> np.ndarray:
        """(clients,) proportions of the next class, which sum to 1. sizes: (clients,) rows of each client so far. full:
        with `cap`, clients of this size or more get none."""
        share = random.dirichlet(np.full(len(sizes), self.beta))
        if self.cap:
            share = np.where(sizes < full, share, 0.0)
            if share.sum() == 0:  # the whole draw went to full clients; there is always one that is not full
                share = (sizes < full).astype(np.float64)
        return share / share.sum()

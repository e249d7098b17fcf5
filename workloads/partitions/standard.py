"""Partitions of the training rows over the clients: iid, by shards, and by Dirichlet proportions. They give every row
to exactly one client, and the rows of a client are in random order."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import numpy as np

from .. import counted
from ..client_index import ClientIndex
from ..workload import Partition


def enough(rows: int, clients: int, each: int = 1) -> None:
    """Raise ValueError unless there are `each` rows for every client."""
    if clients < 1:
        raise ValueError(f"clients >= 1 must hold, got clients={clients}; raise federation.clients")
    if rows < clients * each:
        raise ValueError(
            f"rows >= clients * {each} must hold so that each client has {each}, got rows={rows}, clients={clients}; "
            "lower federation.clients"
        )


def gathered(rows: np.ndarray, owner: np.ndarray, clients: int) -> ClientIndex:
    """The index of the clients' rows, which stay in their order. rows, owner: (n,), the row numbers and the client that
    has each of them."""
    sizes = np.bincount(owner, minlength=clients)
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    return ClientIndex(offsets, rows[np.argsort(owner, kind="stable")].astype(np.int64))


def in_random_order(index: ClientIndex, random: np.random.Generator) -> ClientIndex:
    """The same index with the rows of each client in random order."""
    rows = index.rows.copy()
    for begin, end in pairwise(index.offsets.tolist()):
        random.shuffle(rows[begin:end])
    return index._replace(rows=rows)


def repaired(index: ClientIndex, minimum: int) -> ClientIndex:
    """The index after every client with fewer than `minimum` rows has got the missing ones.

    Each missing row is the last row of the client that is largest at that moment (the first of equals). There are
    enough rows, so the largest client always has more than `minimum`.
    """
    sizes = index.sizes
    short = np.maximum(minimum - sizes, 0)
    if not short.any():
        return index
    givers, given = _from_the_largest(sizes, int(short.sum()))
    # A client that gives its last row first has given the g-th one at the position end - 1 - g.
    places = index.offsets[givers + 1] - 1 - given
    owner = np.repeat(np.arange(len(sizes)), sizes)
    kept = np.delete(np.arange(len(owner)), places)
    receivers = np.repeat(np.arange(len(sizes)), short)
    rows = np.concatenate([index.rows[kept], index.rows[places]])
    return gathered(rows, np.concatenate([owner[kept], receivers]), len(sizes))


def _from_the_largest(sizes: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Which clients give one row each, (count,), if each row comes from the client that is largest at that moment, the
    first of equals; and how many rows that client has given before, (count,). sizes: (N,) before."""
    by_size = np.argsort(-sizes, kind="stable")
    descending = sizes[by_size]
    givers, level, left = [], int(descending[0]), count
    while left:  # all clients that have `level` rows by now give one, in the order of their numbers
        some = np.sort(by_size[: np.searchsorted(-descending, -level, "right")])[:left]
        givers.append(some)
        level, left = level - 1, left - len(some)
    levels = np.repeat(np.arange(descending[0], level, -1), [len(some) for some in givers])
    every = np.concatenate(givers)
    return every, sizes[every] - levels


@dataclass(frozen=True)
class Iid(Partition):
    """All rows in random order, in equal parts; sizes differ by at most one."""

    by_class: ClassVar[bool] = False

    def deal(self, labels: np.ndarray, clients: int, seed: int) -> ClientIndex:
        enough(len(labels), clients)
        rows = counted.numpy_generator(seed, "partition", "iid").permutation(len(labels))
        return ClientIndex.equal(rows, clients)


@dataclass(frozen=True)
class Contiguous(Partition):
    """Equal parts of consecutive rows in the order of the data set; sizes differ by at most one."""

    by_class: ClassVar[bool] = False

    def deal(self, labels: np.ndarray, clients: int, seed: int) -> ClientIndex:
        enough(len(labels), clients)
        return ClientIndex.equal(np.arange(len(labels)), clients)


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
        shards = ClientIndex.equal(rows[np.argsort(labels[rows], kind="stable")], clients * self.per_client)
        owner = np.empty(len(shards.sizes), dtype=np.int64)
        chosen = random.permutation(len(owner))
        owner[chosen] = np.arange(len(owner))  # the place of each shard among those of all clients, one after another
        by_place = gathered(shards.rows, np.repeat(owner, shards.sizes), len(owner))
        dealt = ClientIndex(by_place.offsets[:: self.per_client], by_place.rows)
        return in_random_order(dealt, random)


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
        order, owner = [], []
        sizes = np.zeros(clients, dtype=np.int64)
        for label in np.unique(labels):
            rows = random.permutation(np.flatnonzero(labels == label))
            share = self._shares(random, sizes, len(labels) / clients)
            cuts = np.round(np.cumsum(share)[:-1] * len(rows)).astype(np.int64)
            pieces = np.diff(cuts, prepend=0, append=len(rows))
            order.append(rows)
            owner.append(np.repeat(np.arange(clients), pieces))
            sizes += pieces
        dealt = gathered(np.concatenate(order), np.concatenate(owner), clients)
        return repaired(in_random_order(dealt, random), self.minimum)

    def _shares(self, random: np.random.Generator, sizes: np.ndarray, full: float) -> np.ndarray:
        """(clients,) proportions of the next class, which sum to 1. sizes: (clients,) rows of each client so far. full:
        with `cap`, clients of this size or more get none."""
        share = random.dirichlet(np.full(len(sizes), self.beta))
        if self.cap:
            share = np.where(sizes < full, share, 0.0)
            if share.sum() == 0:  # the whole draw went to full clients; there is always one that is not full
                share = (sizes < full).astype(np.float64)
        return share / share.sum()

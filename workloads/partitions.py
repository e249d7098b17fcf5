"""Rules that deal the training rows to clients. Every row is dealt once; a client's rows come in random order."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from . import counted
from .base import ClientIndex, Partition


def enough(rows: int, clients: int, each: int = 1) -> None:
    """Raise unless every client can have `each` rows."""
    if clients < 1:
        raise ValueError(f"clients >= 1 must hold, got clients={clients}; raise federation.clients")
    if rows < clients * each:
        raise ValueError(
            f"rows >= clients * {each} must hold so that each client has {each}, got rows={rows}, clients={clients}; "
            "lower federation.clients"
        )


def dealt(clients: list[np.ndarray], random: np.random.Generator) -> ClientIndex:
    """The parts, each client's rows in random order."""
    return ClientIndex.of([random.permutation(rows) for rows in clients])


def repaired(hands: list[np.ndarray], minimum: int) -> list[np.ndarray]:
    """The last rows of the largest clients (of equals, the first) to those with fewer than `minimum`.

    A giver always has more than `minimum`, for there are enough rows: it never comes to be in need itself.
    """
    sizes = np.array([len(hand) for hand in hands])
    gifts = {}
    for poor in np.flatnonzero(sizes < minimum):
        gifts[poor] = []
        for _ in range(minimum - sizes[poor]):
            rich = sizes.argmax()
            sizes[rich] -= 1
            gifts[poor].append(hands[rich][sizes[rich]])
    kept = [hand[:size] for hand, size in zip(hands, sizes, strict=True)]
    return [np.append(hand, gifts[i]).astype(np.int64) if i in gifts else hand for i, hand in enumerate(kept)]


@dataclass(frozen=True)
class Iid(Partition):
    """All rows at random, in equal parts (sizes differ by one at most)."""

    def deal(self, labels: np.ndarray, clients: int, seed: int) -> ClientIndex:
        enough(len(labels), clients)
        rows = counted.numpy_generator(seed, "partition", "iid").permutation(len(labels))
        return ClientIndex.equal(rows, clients)


@dataclass(frozen=True)
class Shards(Partition):
    """Rows sorted by label, cut into clients * per_client shards, dealt at random. McMahan et al. 2017.

    A client meets `per_client` labels or fewer, and one more for each border of two classes inside its shards.
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
        hands = random.permutation(len(shards)).reshape(clients, self.per_client)
        return dealt([np.concatenate([shards[shard] for shard in hand]) for hand in hands], random)


@dataclass(frozen=True)
class Dirichlet(Partition):
    """Each class is cut over the clients by proportions drawn from Dirichlet(beta): the smaller, the more skewed.

    Hsu et al. 2019; Li et al. 2022 (NIID-Bench). `cap`: NIID-Bench's rule that a client who already holds 1 / clients
    of all rows gets none of the next class. There, everything is drawn again until each client has `minimum` rows,
    which may never happen (100 clients, 1,400 rows, beta 0.1). Here the first draw stands and the missing rows are
    taken, one by one, from whichever client is largest at that moment: it ends, it moves as few rows as any repair
    can, and where the draw has `minimum` already it changes nothing.
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
        hands: list[list[np.ndarray]] = [[] for _ in range(clients)]
        sizes = np.zeros(clients, dtype=np.int64)
        for label in np.unique(labels):
            rows = random.permutation(np.flatnonzero(labels == label))
            share = self._shares(random, sizes, len(labels) / clients)
            cuts = np.round(np.cumsum(share)[:-1] * len(rows)).astype(np.int64)
            for client, piece in enumerate(np.split(rows, cuts)):
                hands[client].append(piece)
                sizes[client] += len(piece)
        return ClientIndex.of(repaired([random.permutation(np.concatenate(hand)) for hand in hands], self.minimum))

    def _shares(self, random: np.random.Generator, sizes: np.ndarray, full: float) -> np.ndarray:
        """(clients,) summing to 1; `full`: the size from which `cap` shuts a client out."""
        share = random.dirichlet(np.full(len(sizes), self.beta))
        if self.cap:
            share = np.where(sizes < full, share, 0.0)
            if share.sum() == 0:  # all of the draw went to clients that are full; some client is not
                share = (sizes < full).astype(np.float64)
        return share / share.sum()

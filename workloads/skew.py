"""More ways of being unlike: priors, labels, sizes and shares of positives of each client."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Literal

import numpy as np

from . import counted
from .base import ClientIndex, Partition
from .partitions import dealt, enough, repaired


@dataclass(frozen=True)
class DirichletPrior(Partition):
    """Each client draws shares of the classes from Dirichlet(beta); all clients have equally many rows.

    Jhunjhunwala et al. 2023 (FedExP), whose code picks, row by row, a random client that is not full and a class of its
    shares, again where that class has run out. Here a class that has run out leaves every client's shares, which is the
    same in distribution; a client of whose shares nothing is left takes any row. Sizes differ by one at most.
    """

    beta: float = 0.3

    def __post_init__(self) -> None:
        if not 0 < self.beta < np.inf:
            raise ValueError(f"0 < beta < infinity must hold, got beta={self.beta}; for equal shares choose iid")

    def deal(self, labels: np.ndarray, clients: int, seed: int) -> ClientIndex:
        enough(len(labels), clients)
        random = counted.numpy_generator(seed, "partition", "dirichlet prior")
        classes, places = np.unique(labels, return_inverse=True)
        pools = [random.permutation(np.flatnonzero(places == c)).tolist() for c in range(len(classes))]
        shares = random.dirichlet(np.full(len(classes), self.beta), clients)
        sizes = np.diff(ClientIndex.equal(np.arange(len(labels)), clients).offsets)
        return dealt(_fill(pools, shares, sizes, random), random)


def _fill(pools: list[list[int]], shares: np.ndarray, sizes: np.ndarray, random: np.random.Generator) -> list:
    """Rows taken from the end of each class's pool until every client has its size."""
    hands: list[list[int]] = [[] for _ in sizes]
    open_clients = list(range(len(sizes)))
    bounds = _bounds(shares, pools)
    for who, what in random.random((int(sizes.sum()), 2)).tolist():
        at = int(who * len(open_clients))
        client = open_clients[at]
        c = bisect_right(bounds[client], what)
        hands[client].append(pools[c].pop())
        if not pools[c]:
            bounds = _bounds(shares, pools)
        if len(hands[client]) == sizes[client]:
            open_clients[at] = open_clients[-1]
            open_clients.pop()
    return [np.array(hand, dtype=np.int64) for hand in hands]


def _bounds(shares: np.ndarray, pools: list[list[int]]) -> list[list[float]]:
    """Each client's cumulated shares of the classes that are left; the last class's end is 1 and beyond."""
    left = np.array([len(pool) for pool in pools], dtype=np.float64)
    weights = np.where(left > 0, shares, 0.0)
    total = weights.sum(1, keepdims=True)
    weights = np.where(total > 0, weights, left)
    ends = np.cumsum(weights, 1) / np.maximum(weights.sum(1, keepdims=True), 1e-300)
    last = np.flatnonzero(left > 0)
    if len(last):
        ends[:, last[-1] :] = 2.0
    return ends.tolist()


@dataclass(frozen=True)
class Labels(Partition):
    """Each client has `per_client` labels; the rows of a class are dealt equally to those who have it.

    "least_used", Li et al. 2025 (FedMUD): client by client, the labels that fewest have so far, of equals the first.
    "niid_bench", Li et al. 2022: client i has label i modulo their number, and others at random. A label that nobody
    has leaves its rows undealt, as there.
    """

    per_client: int = 3
    assign: Literal["least_used", "niid_bench"] = "least_used"

    def __post_init__(self) -> None:
        if self.per_client < 1:
            raise ValueError(f"per_client >= 1 must hold, got per_client={self.per_client}")
        if self.assign not in ("least_used", "niid_bench"):
            raise ValueError(f"assign must be least_used or niid_bench, got assign={self.assign!r}")

    def deal(self, labels: np.ndarray, clients: int, seed: int) -> ClientIndex:
        enough(len(labels), clients)
        random = counted.numpy_generator(seed, "partition", "labels")
        classes, places = np.unique(labels, return_inverse=True)
        if self.per_client > len(classes):
            raise ValueError(f"per_client <= labels must hold, got per_client={self.per_client}, labels={len(classes)}")
        if self.assign == "least_used":
            has = self._least_used(clients, len(classes))
        else:
            has = self._niid_bench(clients, len(classes), random)
        hands: list[list[np.ndarray]] = [[] for _ in range(clients)]
        for c in np.flatnonzero(has.any(0)):
            holders = np.flatnonzero(has[:, c])
            rows = random.permutation(np.flatnonzero(places == c))
            enough(len(rows), len(holders))
            for holder, own in zip(holders, np.array_split(rows, len(holders)), strict=True):
                hands[holder].append(own)
        return dealt([np.concatenate(hand) for hand in hands], random)

    def _least_used(self, clients: int, classes: int) -> np.ndarray:
        """(clients, classes) bool"""
        used, has = np.zeros(classes, dtype=np.int64), np.zeros((clients, classes), dtype=bool)
        for client in range(clients):
            chosen = np.argsort(used, kind="stable")[: self.per_client]
            used[chosen] += 1
            has[client, chosen] = True
        return has

    def _niid_bench(self, clients: int, classes: int, random: np.random.Generator) -> np.ndarray:
        has = np.zeros((clients, classes), dtype=bool)
        for client in range(clients):
            others = np.delete(np.arange(classes), client % classes)
            has[client, random.choice(others, self.per_client - 1, replace=False)] = True
            has[client, client % classes] = True
        return has


@dataclass(frozen=True)
class Quantity(Partition):
    """Labels alike, sizes unlike: shares of all rows drawn from Dirichlet(beta). Li et al. 2022 (NIID-Bench).

    There, drawn again until each client has 10 rows; here, missing ones come from the largest, as in `dirichlet`.
    """

    beta: float = 0.5
    minimum: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.beta < np.inf:
            raise ValueError(f"0 < beta < infinity must hold, got beta={self.beta}; for equal sizes choose iid")
        if self.minimum < 1:
            raise ValueError(f"minimum >= 1 must hold, got minimum={self.minimum}")

    def deal(self, labels: np.ndarray, clients: int, seed: int) -> ClientIndex:
        enough(len(labels), clients, self.minimum)
        random = counted.numpy_generator(seed, "partition", "quantity")
        rows = random.permutation(len(labels))
        share = random.dirichlet(np.full(clients, self.beta))
        cuts = np.round(np.cumsum(share)[:-1] * len(rows)).astype(np.int64)
        return ClientIndex.of(repaired(np.split(rows, cuts), self.minimum))


@dataclass(frozen=True)
class PositiveRatio(Partition):
    """Two classes, positives made rare: every negative is kept and floor(r / (1 - r) negatives) positives at random.

    One ratio: rows are dropped from the whole, then dealt in equal parts. A ratio for each client: rows are dealt in
    equal parts, then dropped at each client. Zhang and Gao 2025 (minimax); labels other than `positive` are negative.
    """

    ratios: tuple[float, ...] = (0.1,)
    positive: int = 1

    def __post_init__(self) -> None:
        if not self.ratios or not all(0 < ratio < 1 for ratio in self.ratios):
            raise ValueError(f"0 < ratio < 1 must hold for each of one or more, got ratios={self.ratios}")

    def deal(self, labels: np.ndarray, clients: int, seed: int) -> ClientIndex:
        random = counted.numpy_generator(seed, "partition", "positive ratio")
        rows = random.permutation(len(labels))
        if len(self.ratios) == 1:
            kept = self._thinned(rows, labels, self.ratios[0])
            enough(len(kept), clients)
            return ClientIndex.equal(kept, clients)
        if len(self.ratios) != clients:
            raise ValueError(
                f"one ratio for all or one a client must be given, got {len(self.ratios)} ratios, clients={clients}; "
                "set federation.clients to as many"
            )
        enough(len(rows), clients)
        own = np.split(rows, ClientIndex.equal(rows, clients).offsets[1:-1])
        return ClientIndex.of(
            [self._thinned(hand, labels, ratio) for hand, ratio in zip(own, self.ratios, strict=True)]
        )

    def _thinned(self, rows: np.ndarray, labels: np.ndarray, ratio: float) -> np.ndarray:
        """Rows, in random order as they came, without the last positives that are too many."""
        positive = labels[rows] == self.positive
        wanted = int(np.floor(ratio / (1 - ratio) * (~positive).sum() + 1e-9))
        if wanted > positive.sum() or not wanted:
            raise ValueError(
                f"1 <= positives to keep <= positives must hold, got {wanted} to keep of {int(positive.sum())} at "
                f"ratio {ratio}; change the ratio, or lower federation.clients"
            )
        return rows[~positive | (np.cumsum(positive) <= wanted)]

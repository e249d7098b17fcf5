"""More partitions into heterogeneous clients: by class priors, by labels, and by shares of positives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from .. import counted
from ..client_index import ClientIndex
from ..workload import Partition
from .sizes import BySize
from .standard import enough, gathered, in_random_order

DRAWS = 100_000
"""The number of rows for which `DirichletPrior` draws at a time, so that the draws need little memory."""


@dataclass(frozen=True)
class DirichletPrior(Partition):
    """Each client draws its proportions of the classes from Dirichlet(beta).

    `sizes`: the partition whose sizes the clients have (quantity, lognormal, power_law); None: sizes differ by at most
    one.

    Jhunjhunwala et al. 2023 (FedExP). Their code repeatedly draws a random client that is not full and a class from its
    proportions, and draws the class again if it has no rows left. Here a class without rows is removed from the
    proportions of all clients, which gives the same distribution. When all classes of a client have run out, it takes
    rows of any class.
    """

    beta: float = 0.3
    sizes: Partition | None = None

    def __post_init__(self) -> None:
        if not 0 < self.beta < np.inf:
            raise ValueError(f"0 < beta < infinity must hold, got beta={self.beta}; for equal shares choose iid")
        if not isinstance(self.sizes, BySize | None):
            raise ValueError(
                f"sizes must be a partition by size alone, got {self.sizes}; choose quantity, lognormal or power_law"
            )

    def deal(self, labels: np.ndarray, clients: int, seed: int) -> ClientIndex:
        enough(len(labels), clients)
        random = counted.numpy_generator(seed, "partition", "dirichlet prior")
        classes, places = np.unique(labels, return_inverse=True)
        pools = [random.permutation(np.flatnonzero(places == c)).tolist() for c in range(len(classes))]
        shares = random.dirichlet(np.full(len(classes), self.beta), clients)
        empty = ClientIndex.equal(np.zeros(len(labels), dtype=np.int64), clients)
        if self.sizes is not None:
            empty = empty._replace(offsets=self.sizes.deal(labels, clients, seed).offsets)
        _fill(empty, pools, shares, random)
        return in_random_order(empty, random)


def _fill(index: ClientIndex, pools: list[list[int]], shares: np.ndarray, random: np.random.Generator) -> None:
    """Write the rows of each client into `index`: rows are taken from the ends of the classes' pools until every client
    has its size."""
    place, ends = index.offsets[:-1].tolist(), index.offsets[1:].tolist()  # of the next row of each client, and the end
    open_clients = list(range(len(place)))
    bounds, left = _bounds(shares, pools), len(index.rows)
    while left:
        draws = random.random((min(left, DRAWS), 2))
        left -= len(draws)
        for who, what in draws.tolist():
            at = int(who * len(open_clients))
            client = open_clients[at]
            c = bounds[client].searchsorted(what, "right")
            index.rows[place[client]] = pools[c].pop()
            place[client] += 1
            if not pools[c]:
                bounds = _bounds(shares, pools)
            if place[client] == ends[client]:
                open_clients[at] = open_clients[-1]
                open_clients.pop()


def _bounds(shares: np.ndarray, pools: list[list[int]]) -> np.ndarray:
    """(clients, classes): the cumulative proportions of the classes that have rows left, for each client. The last of
    these classes has a bound above 1, so that every number in [0, 1) lies below some bound."""
    left = np.array([len(pool) for pool in pools], dtype=np.float64)
    weights = np.where(left > 0, shares, 0.0)
    total = weights.sum(1, keepdims=True)
    weights = np.where(total > 0, weights, left)
    ends = np.cumsum(weights, 1) / np.maximum(weights.sum(1, keepdims=True), 1e-300)
    last = np.flatnonzero(left > 0)
    if len(last):
        ends[:, last[-1] :] = 2.0
    return ends


@dataclass(frozen=True)
class Labels(Partition):
    """Each client has `per_client` labels; the rows of a label are divided equally among the clients that have it.

    `assign`: "least_used", Li et al. 2025 (FedMUD), gives each client in turn the labels that the fewest clients have
    so far, the first of equals. "niid_bench", Li et al. 2022, gives client i the label i modulo the number of labels,
    and others at random. The rows of a label that no client has are not used, as in NIID-Bench.
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
        order, owner = [], []
        for c in np.flatnonzero(has.any(0)):
            holders = np.flatnonzero(has[:, c])
            rows = random.permutation(np.flatnonzero(places == c))
            enough(len(rows), len(holders))
            order.append(rows)
            owner.append(np.repeat(holders, ClientIndex.equal(rows, len(holders)).sizes))
        return in_random_order(gathered(np.concatenate(order), np.concatenate(owner), clients), random)

    def _least_used(self, clients: int, classes: int) -> np.ndarray:
        """(clients, classes) bool: which client has which label."""
        has = np.zeros((clients, classes), dtype=bool)
        taken = np.arange(clients * self.per_client) % classes  # the least used label, and the first one, goes round
        has[np.repeat(np.arange(clients), self.per_client), taken] = True
        return has

    def _niid_bench(self, clients: int, classes: int, random: np.random.Generator) -> np.ndarray:
        """(clients, classes) bool: which client has which label."""
        has = np.zeros((clients, classes), dtype=bool)
        for client in range(clients):
            others = np.delete(np.arange(classes), client % classes)
            has[client, random.choice(others, self.per_client - 1, replace=False)] = True
            has[client, client % classes] = True
        return has


@dataclass(frozen=True)
class PositiveRatio(Partition):
    """Makes positives rare: all negatives are kept, and of the positives floor(r / (1 - r) * number of negatives) at
    random. Zhang and Gao 2025 (minimax).

    `positive`: the positive class; all other classes are negative. `ratios`: r, the share of positives. One number
    holds for all rows together: positives are dropped first, then the rows are divided into equal parts. One number per
    client holds for its rows: the rows are divided into equal parts first, then positives are dropped at each client.
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
                f"ratios must hold one number, or one per client, got {len(self.ratios)} for {clients} clients; "
                f"set federation.clients={len(self.ratios)}"
            )
        enough(len(rows), clients)
        own = np.split(rows, ClientIndex.equal(rows, clients).offsets[1:-1])
        return ClientIndex.of(
            [self._thinned(part, labels, ratio) for part, ratio in zip(own, self.ratios, strict=True)]
        )

    def _thinned(self, rows: np.ndarray, labels: np.ndarray, ratio: float) -> np.ndarray:
        """`rows` in their (random) order without the last positives, so that their share is `ratio`."""
        positive = labels[rows] == self.positive
        wanted = int(np.floor(ratio / (1 - ratio) * (~positive).sum() + 1e-9))
        if wanted > positive.sum() or not wanted:
            raise ValueError(
                f"1 <= positives to keep <= positives must hold, got {wanted} to keep of {int(positive.sum())} at "
                f"ratio {ratio}; change the ratio, or lower federation.clients"
            )
        return rows[~positive | (np.cumsum(positive) <= wanted)]

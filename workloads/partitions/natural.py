"""Partitions by a column of the data set: its natural clients (writers, roles, users), or its domains (hospitals,
cameras, cities)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from .. import counted
from ..client_index import ClientIndex
from ..workload import Partition
from .standard import enough, gathered, in_random_order


def client_numbers(names: Sequence[str] | np.ndarray) -> np.ndarray:
    """(n,) int64: each row's client; clients are numbered in the alphabetical order of their names."""
    return np.unique(np.asarray(names), return_inverse=True)[1].astype(np.int64)


@dataclass(frozen=True)
class Natural(Partition):
    """Each client of the run is a natural client of the data set; if the set has more, they are drawn at random.

    Their order is drawn too: client 3 of the run is another natural client with each seed.

    `minimum`: natural clients with fewer rows are left out. `rest`: what happens to the natural clients that are not
    drawn. "drop" leaves their rows out, as Takakura et al. 2025 do (100 of 3,550 writers); "merge" gives each of them
    as a whole to a client of the run, so that every row is used.

    `by`: the training column with the natural clients. A data set of your own files names the column of the file as
    `client`, and it is "client" here; "label" makes a client of each class.
    """

    minimum: int = 1
    rest: Literal["drop", "merge"] = "drop"
    by: str = "client"

    @property
    def column(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.by

    def __post_init__(self) -> None:
        if self.minimum < 1:
            raise ValueError(f"minimum >= 1 must hold, got minimum={self.minimum}")
        if self.rest not in ("drop", "merge"):
            raise ValueError(f"rest must be drop or merge, got rest={self.rest!r}")

    def deal(self, labels: np.ndarray, clients: int, seed: int) -> ClientIndex:
        """labels: (n,) the natural client of each row."""
        random = counted.numpy_generator(seed, "partition", "natural")
        order = np.argsort(labels, kind="stable")
        starts = np.append(np.unique(labels[order], return_index=True)[1], len(order))
        large = np.diff(starts) >= self.minimum
        begins, sizes = starts[:-1][large], np.diff(starts)[large]  # of each natural client's rows in `order`
        if not 1 <= clients <= len(sizes):
            raise ValueError(
                f"1 <= clients <= number of natural clients with {self.minimum} rows or more must hold, got "
                f"clients={clients} and {len(sizes)} natural clients; lower federation.clients or choose another "
                "partition"
            )
        drawn = random.permutation(len(sizes))
        drawn = drawn[:clients] if self.rest == "drop" else drawn
        sizes = sizes[drawn]
        within = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        rows = order[np.repeat(begins[drawn], sizes) + within]
        owner = np.repeat(np.arange(len(drawn)) % clients, sizes)
        return in_random_order(gathered(rows, owner, clients), random)


@dataclass(frozen=True)
class Domains(Partition):
    """Each client has rows of one domain, which is a value of a column: client i has those of the domain i modulo the
    number of domains, in the order of their names. The rows of a domain are divided equally among its clients, at
    random. Li et al. 2021 (FedBN) have one client or several for each of five sets of digits.

    `by`: the training column with the domains, as for `natural`.
    """

    by: str = "client"

    @property
    def column(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.by

    def deal(self, labels: np.ndarray, clients: int, seed: int) -> ClientIndex:
        """labels: (n,) the domain of each row."""
        random = counted.numpy_generator(seed, "partition", "domains")
        domains, places = np.unique(labels, return_inverse=True)
        if clients < len(domains):
            raise ValueError(
                f"clients >= number of domains must hold, got clients={clients} and {len(domains)} values of "
                f"{self.by!r}; raise federation.clients, or choose natural with rest=merge"
            )
        order, owner = [], []
        for domain in range(len(domains)):
            rows = random.permutation(np.flatnonzero(places == domain))
            holders = np.arange(domain, clients, len(domains))
            enough(len(rows), len(holders))
            order.append(rows)
            owner.append(np.repeat(holders, ClientIndex.equal(rows, len(holders)).sizes))
        return gathered(np.concatenate(order), np.concatenate(owner), clients)

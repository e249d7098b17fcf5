"""Partitions into clients of different sizes: quantity skew. The rows are in random order, and a law gives each client
its share of all rows.

    quantity    shares from Dirichlet(beta). Li et al. 2022 (NIID-Bench)
    lognormal   shares in proportion to exp(sigma z), z standard normal: the sizes of the synthetic data of Li et al.
                2020 (FedProx) and of LEAF (Caldas et al. 2018), there with sigma = 2
    power_law   the r-th largest client has a share in proportion to r^-exponent; Li et al. 2020 (FedProx) divide MNIST
                by a power law, whose exponent they do not state

`dirichlet_prior` takes one of them as `sizes`, so that labels and sizes are both skewed.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from .. import counted
from ..client_index import ClientIndex
from ..workload import Partition
from .standard import enough, repaired


class BySize(Partition):
    """A subclass defines `shares` and a setting `minimum`, the least number of rows of a client; the missing rows come
    from the largest clients, as in `Dirichlet`."""

    minimum: int

    by_class: ClassVar[bool] = False

    @abstractmethod
    def shares(self, clients: int, random: np.random.Generator) -> np.ndarray:
        """(clients,) the share of each client in all rows; they sum to 1."""

    def deal(self, labels: np.ndarray, clients: int, seed: int) -> ClientIndex:
        enough(len(labels), clients, self.minimum)
        random = counted.numpy_generator(seed, "partition", "quantity")
        rows = random.permutation(len(labels))
        cuts = np.round(np.cumsum(self.shares(clients, random))[:-1] * len(rows)).astype(np.int64)
        return repaired(ClientIndex(np.concatenate([[0], cuts, [len(rows)]]), rows), self.minimum)


def check(minimum: int, name: str, value: float) -> None:
    """Raise ValueError unless minimum >= 1, and the setting of the law with this name is positive and finite."""
    if not 0 < value < np.inf:
        raise ValueError(f"0 < {name} < infinity must hold, got {name}={value}; for equal sizes choose iid")
    if minimum < 1:
        raise ValueError(f"minimum >= 1 must hold, got minimum={minimum}")


@dataclass(frozen=True)
class Quantity(BySize):
    """Clients have the same distribution of labels but different sizes: their shares of all rows are drawn from
    Dirichlet(beta). Li et al. 2022 (NIID-Bench).

    `minimum`: the least number of rows of a client. NIID-Bench draws again until each client has 10 rows; here the
    missing rows come from the largest clients, as in `Dirichlet`.
    """

    beta: float = 0.5
    minimum: int = 1

    def __post_init__(self) -> None:
        check(self.minimum, "beta", self.beta)

    def shares(self, clients: int, random: np.random.Generator) -> np.ndarray:
        return random.dirichlet(np.full(clients, self.beta))


@dataclass(frozen=True)
class LogNormal(BySize):
    """Clients have the same distribution of labels, and sizes in proportion to exp(sigma z), z standard normal.

    `sigma`: the standard deviation of the logarithms of the sizes. `minimum`: the least number of rows of a client; the
    missing rows come from the largest clients.
    """

    sigma: float = 1.0
    minimum: int = 1

    def __post_init__(self) -> None:
        check(self.minimum, "sigma", self.sigma)

    def shares(self, clients: int, random: np.random.Generator) -> np.ndarray:
        z = random.standard_normal(clients)
        weights = np.exp(self.sigma * (z - z.max()))  # the largest is 1, so that nothing overflows
        return weights / weights.sum()


@dataclass(frozen=True)
class PowerLaw(BySize):
    """Clients have the same distribution of labels, and the r-th largest of them has a size in proportion to
    r^-exponent. Which client is the r-th largest is drawn at random.

    `exponent`: the larger it is, the more rows the largest clients have. `minimum`: the least number of rows of a
    client; the missing rows come from the largest clients.
    """

    exponent: float = 1.0
    minimum: int = 1

    def __post_init__(self) -> None:
        check(self.minimum, "exponent", self.exponent)

    def shares(self, clients: int, random: np.random.Generator) -> np.ndarray:
        weights = random.permutation(np.arange(1, clients + 1) ** -self.exponent)
        return weights / weights.sum()

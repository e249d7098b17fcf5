"""CAF, covariance-bound agnostic filter: rows lose weight along the direction in which the rows vary most.

Allouah, Guerraoui, Stephan, 2025. With c = 1 for every row:

    while sum of c > S - 2 f:
        mu = sum of c_i x_i / sum of c;  (lambda, v): the largest eigenvalue of sum of c_i (x_i - mu)(x_i - mu)' / sum c
        tau_i = <x_i - mu, v>^2;  c_i <- c_i (1 - tau_i / max of tau)
    answer: the mu with the least lambda

In inner products K about mu: with A = diag(sqrt c), A K A / sum of c has the same lambda, and from its unit eigenvector
u, tau_i = (K A u)_i^2 / (u' A K A u). Three departures from published code: the eigenvector is exact and not one power
step from a random start; the maximum of tau is over rows that still have weight, so that every turn takes one row out;
and f = 0 is the mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from .contract import FewerThanHalf
from .messages import Answer, Messages, product


@dataclass(frozen=True, kw_only=True)
class Caf(FewerThanHalf):
    """f: the number of Byzantine messages to tolerate."""

    pairwise: ClassVar[bool] = True
    called: ClassVar[str] = "CAF"
    takes_weights: ClassVar[bool] = False

    def aggregate(self, x: Messages) -> Answer:
        gram, c = x.gram(), np.ones(x.count)
        best, least = c / c.sum(), np.inf
        while c.sum() > x.count - 2 * x.f:
            weights = c / c.sum()
            about = gram_about(gram, weights)
            eigenvalue, projections2 = top_direction(about, c)
            if eigenvalue < least:
                best, least = weights, eigenvalue
            largest = projections2[c > 0].max()
            if eigenvalue <= 0 or largest <= 0:
                break
            c = np.where(c > 0, c * (1 - projections2 / largest), 0.0)
        return x.sum(best)


def gram_about(gram: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """(S, S): the inner products of the rows about their combination with these weights."""
    products = product(gram, weights)
    return gram - products[:, None] - products[None, :] + float(product(weights, products))


def top_direction(gram: np.ndarray, c: np.ndarray) -> tuple[float, np.ndarray]:
    """(the largest eigenvalue of the rows' covariance with weights c, (S,) the squared projections of the rows on its
    direction). gram: the inner products about the weighted mean."""
    root = np.sqrt(c)
    matrix = root[:, None] * gram * root[None, :]
    values, vectors = torch.linalg.eigh(torch.from_numpy((matrix + matrix.T) / 2))
    value, u = float(values[-1]), vectors[:, -1].numpy()
    if value <= 0:
        return 0.0, np.zeros(len(c))
    return value / float(c.sum()), np.square(product(gram, root * u)) / value

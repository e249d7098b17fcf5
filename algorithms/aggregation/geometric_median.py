"""The geometric median: the point with the least sum of distances to the messages.

    argmin over z of sum of alpha_i |z - x_i|,  alpha_i the clients' weights, scaled to sum 1

Weiszfeld's iteration with the step of Vardi and Zhang (PNAS 2000), which leaves a row that is not the answer. It runs
on the weights w of z = sum of w_i x_i, so that only the S x S inner products are needed. Inner products are taken about
the row m with the least sum of distances, which is an honest one while less than half of the messages are Byzantine:
otherwise rows of enormous norm would drown the others.

    K_ij = <x_i - x_m, x_j - x_m>,  d_i^2 = K_ii - 2 (K w)_i + w'K w,  beta_i = alpha_i / d_i
    w <- w + max(0, 1 - eta / rho) (beta / sum of beta - w)

Rows with d_i at 0 are left out of beta; eta is the sum of their alpha, rho = |sum of alpha_i (z - x_i) / d_i|. The
residual max(0, rho - eta) is of unit vectors, so that `tol` has no unit. Only row m can be the answer exactly, which is
found out first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from .contract import Aggregator
from .messages import Answer, Messages, distances_from, product


@dataclass(frozen=True, kw_only=True)
class GeometricMedian(Aggregator):
    """tol: the residual at which it stops. iterations: at most so many; the column `robust/residual` says where it
    stopped. floor: distances below it, in units of the median distance, count as 0."""

    tol: float = 1e-8
    iterations: int = 1000
    floor: float = 1e-12

    pairwise: ClassVar[bool] = True
    called: ClassVar[str] = "the geometric median"

    def __post_init__(self) -> None:
        if not (self.tol > 0 and self.iterations > 0 and self.floor >= 0):
            raise ValueError(
                "tol > 0, iterations > 0 and floor >= 0 must hold, got "
                f"tol={self.tol}, iterations={self.iterations}, floor={self.floor}"
            )

    def aggregate(self, x: Messages) -> Answer:
        weights, residual = geometric_median(x, self.tol, self.iterations, self.floor)
        note = ""
        if residual > self.tol:
            note = (
                f"the geometric median was not found in {self.iterations:,} iterations, its residual was "
                f"{residual:.3g} (column robust/residual); raise aggregate.iterations, or aggregate.tol={self.tol:g}"
            )
        return x.sum(weights)._replace(columns={"residual": residual}, note=note)


def geometric_median(x: Messages, tol: float, iterations: int, floor: float) -> tuple[np.ndarray, float]:
    """((S,) the weights of the messages in the answer, the residual)."""
    gram, alpha = x.gram(), x.weights / x.weights.sum()
    distances = np.sqrt(x.distances2)
    m = int(np.argmin(distances @ alpha if len(alpha) < 2 else np.einsum("ij,j->i", distances, alpha)))
    about = gram - gram[:, m : m + 1] - gram[m : m + 1, :] + gram[m, m]
    apart = distances[m] > 0
    u = np.divide(alpha, distances[m], out=np.zeros_like(alpha), where=apart)
    if np.sqrt(max(0.0, float(product(u, product(about, u))))) < alpha[~apart].sum():
        return np.eye(x.count)[m], 0.0
    least = floor * float(np.median(distances[m]))
    w, residual = alpha.copy(), np.inf
    for _ in range(iterations):
        d = distances_from(w, about)
        away = d > least
        beta = np.divide(alpha, d, out=np.zeros_like(alpha), where=away)
        if not away.any():
            return w, 0.0
        e = beta / beta.sum() - w
        rho = np.sqrt(max(0.0, float(product(e, product(about, e))))) * beta.sum()
        eta = alpha[~away].sum()
        residual = max(0.0, rho - eta)
        if residual <= tol:
            break
        w = w + max(0.0, 1 - eta / rho) * e
    return w, float(residual)

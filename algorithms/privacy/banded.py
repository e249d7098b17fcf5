"""Noise that is correlated over the rounds by a banded matrix (DP-MF).

    banded            Choquette-Choo et al., NeurIPS 2023, arXiv:2306.08153: C n = Z, where C is lower triangular with
                      equal diagonals c_0 >= c_1 >= ... > 0, `bands` of them, and columns of norm 1.
                      n_t = (Z_t - sum over j < bands of c_j n_(t-j)) / c_0
    banded_inverse    arXiv:2505.12128: n_t = sum over j < bands of w_j Z_(t-j), where w is the beginning of the inverse
                      square root 1, -1/2, -1/8, -1/16, ...

Columns of C that are `bands` apart share no row, so that a client's turns are separate releases of sensitivity 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .gaussian import turns
from .mechanism import Composition, Draw, Mechanism


class BandedState(NamedTuple):
    """coefficients: (bands,) float64, c. last: the noise of the last bands - 1 rounds, the newest first."""

    coefficients: Tensor
    last: tuple[list[Tensor], ...]


@dataclass(frozen=True)
class Banded(Mechanism):
    """`bands`: the number of diagonals, at least 1. `coefficients`: "sqrt", those of the square root of the matrix of
    prefix sums, or "optimised", which have the least mean variance of the prefix sums over the run's rounds."""

    bands: int
    coefficients: Literal["sqrt", "optimised"] = "sqrt"

    def __post_init__(self) -> None:
        if self.bands < 1:
            raise ValueError(f"bands >= 1 must hold, got bands={self.bands}; raise bands")

    def check(self, rounds: int, separation: int | None) -> None:
        if separation is not None and self.bands > separation:
            raise ValueError(
                f"bands <= separation must hold, got bands={self.bands}, separation={separation}; lower bands"
            )

    def numbers(self, rounds: int) -> np.ndarray:
        """(bands,): c."""
        return unit_root(self.bands) if self.coefficients == "sqrt" else optimised(self.bands, rounds)

    def init(self, zeros: Sequence[Tensor], rounds: int) -> Any:
        last = tuple([leaf.clone() for leaf in zeros] for _ in range(self.bands - 1))
        return BandedState(torch.from_numpy(self.numbers(rounds).copy()), last)

    def noise(self, t: int, draw: Draw, state: BandedState) -> tuple[list[Tensor], Any]:
        c = state.coefficients.tolist()
        found = draw("noise", t)
        for c_j, earlier in zip(c[1:], state.last, strict=True):
            for leaf, old in zip(found, earlier, strict=True):
                leaf.sub_(old, alpha=c_j)
        found = [leaf.div_(c[0]) for leaf in found]
        return found, state._replace(last=(found, *state.last)[: self.bands - 1])

    def deviation(self, t: int, rounds: int) -> float:
        return float(np.sum(inverse(self.numbers(rounds), t) ** 2) ** 0.5)

    def composition(self, t: int, separation: int | None, rounds: int) -> Composition:
        assert separation is not None
        return Composition(turns(t, separation))


@dataclass(frozen=True)
class BandedInverse(Mechanism):
    """`bands`: the number of rounds whose draws are in a round's noise, at least 1. Past draws are drawn again, so that
    nothing is kept."""

    bands: int

    def __post_init__(self) -> None:
        if self.bands < 1:
            raise ValueError(f"bands >= 1 must hold, got bands={self.bands}; raise bands")

    def noise(self, t: int, draw: Draw, state: Any) -> tuple[list[Tensor], Any]:
        found = draw("noise", t)
        for j, w_j in enumerate(self.numbers()[1:t].tolist(), 1):
            for leaf, earlier in zip(found, draw("noise", t - j), strict=True):
                leaf.add_(earlier, alpha=w_j)
        return found, state

    def numbers(self) -> np.ndarray:
        """(bands,): w."""
        return inverse(root(self.bands), self.bands)

    def deviation(self, t: int, rounds: int) -> float:
        return float(np.sum(self.numbers()[:t] ** 2) ** 0.5)

    def composition(self, t: int, separation: int | None, rounds: int) -> Composition:
        """One release of the vector that a client's turns add up to; the worst client begins with round 1, since the
        coefficients are positive and do not increase."""
        assert separation is not None
        c = inverse(self.numbers(), t)
        column = np.zeros(t)
        for first in range(0, t, separation):
            column[first:] += c[: t - first]
        return Composition(1, float(np.sum(column**2) ** 0.5), sampled=False)


@lru_cache(16)
def root(count: int) -> np.ndarray:
    """(count,): the first coefficients of (1 - x)^(-1/2): 1, 1/2, 3/8, ..."""
    j = np.arange(1, count)
    return np.concatenate([[1.0], np.cumprod((2 * j - 1) / (2 * j))])


def unit_root(bands: int) -> np.ndarray:
    """(bands,): the same with norm 1."""
    return root(bands) / np.linalg.norm(root(bands))


def inverse(c: np.ndarray, count: int) -> np.ndarray:
    """(count,): the first coefficients of the power series 1 / c."""
    from scipy.signal import lfilter

    impulse = np.zeros(count)
    impulse[0] = 1.0
    return np.asarray(lfilter([1.0], c, impulse))


def mean_variance(c: np.ndarray, rounds: int) -> float:
    """|c|^2 times the mean over the rounds of the variance of a coordinate of n_1 + ... + n_t."""
    sums = np.cumsum(np.cumsum(inverse(c, rounds)) ** 2)
    return float(np.sum(c**2) * np.mean(sums))


@lru_cache(16)
def optimised(bands: int, rounds: int) -> np.ndarray:
    """(bands,): c of norm 1 with the least `mean_variance`, by L-BFGS from the square root."""
    from scipy.optimize import minimize

    def loss(tail: np.ndarray) -> float:
        return mean_variance(np.concatenate([[1.0], tail]), rounds)

    if bands == 1:
        return np.ones(1)
    tail = minimize(loss, root(bands)[1:], method="L-BFGS-B", options={"maxiter": 200, "ftol": 1e-13}).x
    c = np.concatenate([[1.0], tail])
    if not (np.all(c > 0) and np.all(np.diff(c) <= 0)):
        raise ValueError(f"no decreasing coefficients were found for bands={bands}; choose coefficients: sqrt")
    return c / np.linalg.norm(c)

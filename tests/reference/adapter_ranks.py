"""Rounds of adapters of different ranks, written from the published equations in numpy. Clients have factors of their
own size: nothing is padded before the server adds up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Array = np.ndarray


@dataclass
class Ranks:
    """Clients with the loss |W x - y|^2 / 2 over their rows, plain descent, weights of the mean. scales: s of each
    client; largest: that of the largest rank. anew: round, from 2 -> (A, B) with which FLoRA begins it."""

    rows: Sequence[tuple[Array, Array]]
    ranks: Sequence[int]
    scales: Sequence[float]
    shares: Sequence[float]
    lr: float
    steps: int
    anew: Callable[[int], tuple[Array, Array]]
    own_b: dict[int, Array] = field(default_factory=dict)

    def local(self, i: int, w: Array, a: Array, b: Array, trains_a: bool = True) -> tuple[Array, Array]:
        """(A_i, B_i) after the local steps from factors of the client's own size."""
        x, y = self.rows[i]
        s = self.scales[i]
        for _ in range(self.steps):
            g = (x @ (w + s * b @ a).T - y).T @ x / len(x)
            da, db = s * b.T @ g, s * g @ a.T
            a, b = (a - self.lr * da if trains_a else a), b - self.lr * db
        return a, b

    def mean(self, parts: Sequence[Array], like: Array) -> Array:
        """The mean of factors that are padded with 0 to the size of `like`."""
        total = np.zeros_like(like)
        for share, part in zip(self.shares, parts, strict=True):
            total[: part.shape[0], : part.shape[1]] += share * part
        return total

    def round(self, method: str, number: int, w: Array, a: Array, b: Array) -> tuple[Array, Array, Array]:
        """(W, A, B) after a round."""
        largest = self.scales[int(np.argmax(self.ranks))]
        found: list[Any] = []
        for i, r in enumerate(self.ranks):
            begin = self.own_b.get(i, b[:, :r]) if method == "fedsa" else b[:, :r]
            found.append(self.local(i, w, a[:r], begin, trains_a=method != "ffa"))
        products = sum(share * s * bi @ ai for share, s, (ai, bi) in zip(self.shares, self.scales, found, strict=True))
        mean_a, mean_b = (self.mean([each[side] for each in found], like) for side, like in enumerate((a, b)))
        if method == "fedsa":
            self.own_b = {i: bi for i, (_, bi) in enumerate(found)}
            return w, mean_a, b
        if method == "ffa":
            return w, a, mean_b
        if method == "flora":
            return (w + products, *self.anew(number + 1))
        if method == "fedex":
            return w + products - largest * mean_b @ mean_a, mean_a, mean_b
        return w, mean_a, mean_b

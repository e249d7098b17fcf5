"""Bucketing: the messages are put into buckets of s in a random order, and each bucket's mean is one message.

Karimireddy, He, Jaggi, ICLR 2022, arXiv:2006.09365. The last bucket may have fewer messages; its mean is over those.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ...workloads import counted
from .contract import Before
from .messages import Messages


@dataclass(frozen=True, kw_only=True)
class Bucketing(Before):
    """s: messages in a bucket. The rule after it must tolerate as many Byzantine rows as without buckets."""

    s: int = 2

    called: ClassVar[str] = "bucketing"
    condition: ClassVar[str] = "s <= S"
    takes_weights: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.s < 1:
            raise ValueError(f"s >= 1 must hold, got s={self.s}")

    def fewest(self, f: int) -> int:
        return self.s

    def count(self, rows: int) -> int:
        return -(-rows // self.s)

    def keeps_mean(self, rows: int) -> bool:
        return self.s in (1, rows)

    def apply(self, x: Messages) -> Messages:
        order = counted.numpy_generator(int(x.key), "bucketing").permutation(x.count)
        return x.combine(buckets(order, self.s))


def buckets(order: np.ndarray, s: int) -> np.ndarray:
    """(ceil(S/s), S): the weights of the rows in each bucket. order: (S,), a permutation of the rows."""
    matrix = np.zeros((-(-len(order) // s), len(order)))
    for place, row in enumerate(order):
        matrix[place // s, row] = 1.0
    return matrix / matrix.sum(axis=1, keepdims=True)

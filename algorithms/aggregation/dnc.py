"""DnC, divide and conquer: messages that stand out along the direction in which the messages vary most are left out.

Shejwalkar, Houmansadr, NDSS 2021. `iterations` times, on `dimension` coordinates that are drawn at random:

    v: the top right singular vector of the centred S x b matrix;  s_i = <x_i - mean, v>^2
    good: the S - floor(c f) rows of least s

The answer is the mean of the rows that are good every time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from ...workloads import counted
from .contract import Aggregator, Faults
from .messages import Answer, Messages


@dataclass(frozen=True, kw_only=True)
class Dnc(Aggregator):
    """f: the number of Byzantine messages to tolerate. c: floor(c f) rows are left out each time. dimension: the number
    of coordinates that are drawn each time, all of them if a vector has fewer."""

    f: Faults
    c: float = 1.0
    iterations: int = 1
    dimension: int = 10_000

    called: ClassVar[str] = "DnC"

    def __post_init__(self) -> None:
        if not (self.c >= 0 and self.iterations >= 1 and self.dimension >= 1):
            raise ValueError(
                "c >= 0, iterations >= 1 and dimension >= 1 must hold, got "
                f"c={self.c}, iterations={self.iterations}, dimension={self.dimension}"
            )

    def refuses(self, rows: int, f: int) -> str:
        out = int(self.c * f)
        if self.iterations * out < rows:
            return ""
        return f"DnC needs iterations * floor(c f) < S, got {self.iterations} * {out} with S={rows}; lower aggregate.f"

    def draw(self, x: Messages, iteration: int) -> np.ndarray:
        """(b,) the coordinates of one iteration, in ascending order."""
        if x.length <= self.dimension:
            return np.arange(x.length)
        generator = counted.numpy_generator(int(x.key), "dnc", iteration)
        return np.sort(generator.choice(x.length, self.dimension, replace=False, shuffle=False))

    def aggregate(self, x: Messages) -> Answer:
        drawn = [self.draw(x, iteration) for iteration in range(self.iterations)]
        places, good = np.unique(np.concatenate(drawn)), np.ones(x.count, dtype=bool)
        values = x.at(places)
        for each in drawn:
            part = values[:, np.searchsorted(places, each)]
            outlying = squared_projections(part - part.mean(axis=0))
            kept = np.argsort(outlying, kind="stable")[: x.count - int(self.c * x.f)]
            good &= np.isin(np.arange(x.count), kept)
        return x.average(good)


def squared_projections(x: np.ndarray) -> np.ndarray:
    """(S,) the squared projections of the rows of x on its top right singular vector, by the eigenvectors of x x'."""
    rows = torch.from_numpy(x)
    values, vectors = torch.linalg.eigh(rows @ rows.T)
    return np.square(vectors[:, -1].numpy()) * max(0.0, float(values[-1]))

"""Any workload with noise in its gradients, or with labels that are wrong.

    gradient of a batch      that of the workload + scale * xi, xi independent in every entry and step; laws: `noise`
    label of a training row  with probability `flips` another class at random

The noise is a term <scale * xi, p> of every loss: its gradient is exact for any method, the mean over a batch has it
once, and methods that ask twice in a step see the same xi. Reports and test labels are those of the workload.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

import numpy as np
import torch
from torch import Tensor

from . import counted, noise
from .base import Batch, Columns, Params, Split, Workload


@dataclass(frozen=True)
class Noisy(Workload):
    """`of`: the workload; `tail`: see `noise`, whether the noise has a mean (1) or a variance (2) depends on it."""

    of: Workload
    law: noise.Law = "gaussian"
    tail: float = 1.5
    scale: float = 0.0
    flips: float = 0.0

    def __post_init__(self) -> None:
        noise.check(self.law, self.tail)
        if not 0 <= self.scale < inf:
            raise ValueError(f"0 <= scale < infinity must hold, got scale={self.scale}")
        if not 0 <= self.flips <= 1:
            raise ValueError(f"0 <= flips <= 1 must hold, got flips={self.flips}")

    def check(self) -> None:
        self.of.check()

    def split(self, seed: int, clients: int) -> Split:
        split = self.of.split(seed, clients)
        if not self.flips:
            return split
        classes = getattr(self.of, "classes", None)
        if classes is None or "label" not in split.train:
            raise ValueError(f"flips needs a workload with labels and classes, got {type(self.of).__name__}")
        return split._replace(train={**split.train, "label": flipped(split.train["label"], classes, self.flips, seed)})

    def init(self, seed: int) -> dict[str, Tensor]:
        return self.of.init(seed)

    def losses(self, p: Params, batch: Batch) -> Tensor:
        losses = self.of.losses(p, batch)
        if not self.scale:
            return losses
        own = [value for name, value in p.items() if name not in self.of.buffers]
        sizes = [value.numel() for value in own]
        xi = noise.draw(self.law, self.tail, counted.key(batch["key"], "gradient noise"), sum(sizes))
        parts = torch.split(xi.to(losses.dtype), sizes)
        term = sum((part * value.reshape(-1)).sum() for part, value in zip(parts, own, strict=True))
        # Its value is taken away again: a loss that is reported stays the workload's.
        return losses + self.scale * (term - _constant(term))

    def report(self, p: Params, batch: Batch) -> dict[str, Tensor]:
        return self.of.report(p, batch)

    @property
    def buffers(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.of.buffers

    @property
    def whole(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.of.whole

    @property
    def lower(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.of.lower

    def summary(self, means: Mapping[str, float], columns: Columns) -> dict[str, float]:
        return self.of.summary(means, columns)


def _constant(term: Tensor | int) -> Tensor | int:
    return term.detach() if isinstance(term, Tensor) else term


def flipped(labels: np.ndarray, classes: int, share: float, seed: int) -> np.ndarray:
    """(n,) labels, each another one of the classes with probability `share`."""
    random = counted.numpy_generator(seed, "flips")
    chosen = random.random(len(labels)) < share
    return np.where(chosen, (labels + random.integers(1, classes, len(labels))) % classes, labels).astype(labels.dtype)

"""Any workload with noise in its gradients, with labels that are wrong, or with inputs that are noisier the higher the
client's number.

    gradient of a batch      that of the workload + scale * xi, xi independent in every entry and step; laws: `noise`
    label of a training row  with probability `flips` another class at random
    input of a training row  + features * (i + 1) / N * xi at client i of N, xi standard normal, anew in every step; in
                             units of the input, where bytes are from 0 to 1: Li et al. 2022 (NIID-Bench)

The noise is a term <scale * xi, p> of every loss: its gradient is exact for any method, the mean over a batch has it
once, and methods that ask twice in a step see the same xi. Reports and test labels are those of the workload.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np
import torch
from torch import Tensor

from . import counted, noise
from .base import Batch, ClientIndex, Params, Split
from .wrapped import Wrapped, unseen


@dataclass(frozen=True)
class Noisy(Wrapped):
    """`of`: the workload; `tail`: see `noise`, whether the noise has a mean (1) or a variance (2) depends on it."""

    law: noise.Law = "gaussian"
    tail: float = 1.5
    scale: float = 0.0
    flips: float = 0.0
    features: float = 0.0

    def __post_init__(self) -> None:
        noise.check(self.law, self.tail)
        for name in ("scale", "features"):
            if not 0 <= getattr(self, name) < inf:
                raise ValueError(f"0 <= {name} < infinity must hold, got {name}={getattr(self, name)}")
        if not 0 <= self.flips <= 1:
            raise ValueError(f"0 <= flips <= 1 must hold, got flips={self.flips}")

    def split(self, seed: int, clients: int) -> Split:
        """With a column `noise` where `features` is above 0: the deviation of the row's client."""
        split = self.of.split(seed, clients)
        train = dict(split.train)
        if self.flips:
            classes = getattr(self.of, "classes", None)
            if classes is None or "label" not in train:
                raise ValueError(f"flips needs a workload with labels and classes, got {type(self.of).__name__}")
            train["label"] = flipped(train["label"], classes, self.flips, seed)
        if self.features:
            if "input" not in train or train["input"].dtype not in (np.uint8, np.float32, np.float64):
                raise ValueError(f"features needs inputs that are numbers or images, got {type(self.of).__name__}")
            train["noise"] = levels(split.client_index, len(train["input"]), self.features)
        return split._replace(train=train)

    def losses(self, p: Params, batch: Batch) -> Tensor:
        losses = self.of.losses(p, batch if "noise" not in batch else {**batch, "input": noisier(batch)})
        if not self.scale:
            return losses
        own = [value for name, value in p.items() if name not in self.of.buffers]
        sizes = [value.numel() for value in own]
        xi = noise.draw(self.law, self.tail, counted.key(batch["key"], "gradient noise"), sum(sizes))
        parts = torch.split(xi.to(losses.dtype), sizes)
        terms = [(part * value.reshape(-1)).sum() for part, value in zip(parts, own, strict=True)]
        return losses + unseen(self.scale * torch.stack(terms).sum())


def levels(parts: ClientIndex, rows: int, most: float) -> np.ndarray:
    """(rows,) float32, of client i of N most * (i + 1) / N; 0 of rows that nobody has."""
    clients = len(parts.sizes)
    deviation = np.zeros(rows, dtype=np.float32)
    deviation[parts.rows] = np.repeat(most * np.arange(1, clients + 1) / clients, parts.sizes)
    return deviation


def noisier(batch: Batch) -> Tensor:
    """The batch's inputs, float; an example's noise depends on its place in the batch, not on the batch's length."""
    x = batch["input"]
    x = x.float() / 255 if x.dtype == torch.uint8 else x
    places = torch.arange(x.shape[0], device=x.device)
    xi = counted.normal(counted.key(batch["key"], "feature noise", places), x[0].numel()).view(x.shape)
    return x + batch["noise"].view(-1, *[1] * (x.ndim - 1)).to(x.dtype) * xi.to(x.dtype)


def flipped(labels: np.ndarray, classes: int, share: float, seed: int) -> np.ndarray:
    """(n,) labels, each another one of the classes with probability `share`."""
    random = counted.numpy_generator(seed, "flips")
    chosen = random.random(len(labels)) < share
    return np.where(chosen, (labels + random.integers(1, classes, len(labels))) % classes, labels).astype(labels.dtype)

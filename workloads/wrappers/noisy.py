"""Any workload with gradient noise, with wrong labels, or with input noise that grows with the number of the client.

    gradient of a batch      scale * xi is added, xi independent in every entry and step; see `noise` for its laws
    label of a training row  is replaced by another random class with probability `flips`
    input of a training row  features * (i + 1) / N * xi is added at client i of N, xi standard normal and fresh in
                             every step, in units of the input; bytes count as 0 to 1. Li et al. 2022 (NIID-Bench)

The gradient noise is the gradient of a term <scale * xi, p> that is added to every loss. It is therefore exact for any
method, enters the mean over a batch once, and is the same when a method asks the oracle twice in a step. The term has
the value 0 in the loss. Reports and test labels are those of the inner workload.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .. import counted
from ..client_index import ClientIndex
from ..settings import check_finite_from
from ..workload import Batch, Params, Split
from . import noise
from .wrapped import Wrapped, unseen


@dataclass(frozen=True)
class Noisy(Wrapped):
    """`of`: the inner workload. `law`, `tail`: distribution of the gradient noise, see `noise`. It has a mean for tails
    above 1 and a variance for tails above 2 (stable: at 2; gaussian: always). `scale`: factor of the gradient noise.
    `flips`: probability that a label is wrong. `features`: standard deviation of the input noise of the last client."""

    law: noise.Law = "gaussian"
    tail: float = 1.5
    scale: float = 0.0
    flips: float = 0.0
    features: float = 0.0

    def __post_init__(self) -> None:
        noise.check(self.law, self.tail)
        check_finite_from(self, scale=0, features=0)
        if not 0 <= self.flips <= 1:
            raise ValueError(f"0 <= flips <= 1 must hold, got flips={self.flips}")

    def split(self, seed: int, clients: int) -> Split:
        """Adds the column "noise", (n,) float32, if `features` > 0: the standard deviation of the row's input noise."""
        split = self.of.split(seed, clients)
        train = dict(split.train)
        if self.flips:
            classes = getattr(self.of, "classes", None)
            if classes is None or "label" not in train or train["label"].ndim > 1:
                raise ValueError(
                    f"flips needs a workload with labels and classes, got {type(self.of).__name__}; set flips=0"
                )
            train["label"] = flipped(train["label"], classes, self.flips, seed)
        if self.features:
            if "input" not in train or train["input"].dtype not in (np.uint8, np.float32, np.float64):
                raise ValueError(
                    f"features needs inputs that are numbers or images, got {type(self.of).__name__}; set features=0"
                )
            train["noise"] = levels(split.client_index, len(train["input"]), self.features)
        return split._replace(train=train)

    def differences(self, seed: int, clients: int) -> dict[str, np.ndarray]:
        own = {"input noise": self.features * np.arange(1, clients + 1) / clients} if self.features else {}
        return {**self.of.differences(seed, clients), **own}

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


def levels(client_index: ClientIndex, rows: int, most: float) -> np.ndarray:
    """(rows,) float32: most * (i + 1) / N in the rows of client i of N, and 0 in rows that no client has."""
    clients = len(client_index.sizes)
    deviation = np.zeros(rows, dtype=np.float32)
    deviation[client_index.rows] = np.repeat(most * np.arange(1, clients + 1) / clients, client_index.sizes)
    return deviation


def noisier(batch: Batch) -> Tensor:
    """The inputs of a batch with noise, in floats. The noise of an example depends on its place in the batch, not on
    the length of the batch."""
    x = batch["input"]
    x = x.float() / 255 if x.dtype == torch.uint8 else x
    places = torch.arange(x.shape[0], device=x.device)
    xi = counted.normal(counted.key(batch["key"], "feature noise", places), x[0].numel()).view(x.shape)
    return x + batch["noise"].view(-1, *[1] * (x.ndim - 1)).to(x.dtype) * xi.to(x.dtype)


def flipped(labels: np.ndarray, classes: int, share: float, seed: int) -> np.ndarray:
    """The labels, (n,), each replaced by another random class with probability `share`."""
    random = counted.numpy_generator(seed, "flips")
    chosen = random.random(len(labels)) < share
    return np.where(chosen, (labels + random.integers(1, classes, len(labels))) % classes, labels).astype(labels.dtype)

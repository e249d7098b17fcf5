"""Any classification workload whose logits are calibrated by how often each client has each class.

    fedlc      cross-entropy of z_c - tau n_c^(-1/4); Zhang, Li, Li, Xu, Wu, Ding, Wu 2022, ICML, arXiv:2209.00189
    balanced   cross-entropy of z_c + log n_c; Ren et al. 2020, NeurIPS (balanced softmax), as FedRoD trains its head

n_c is the number of training rows of class c that the row's client has. Classes that a client lacks are pushed away
less, or not at all, by its local steps, so that rare classes survive the averaging. Reports and the losses that clients
find before they train (`Algorithm.looks`) are those of the plain logits.

With absent = "floor" a class without rows counts 1e-8, as in public codes; with "exclude" it leaves the denominator.
The row's own class always stays, with 1e-8 where the client lacks it, as a label that an attack has flipped may.
With over = "others" the denominator omits the row's own class, as the paper prints it; codes have all classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ..objectives import Classes, wide
from ..settings import check_finite_from
from ..workload import Batch, Params, Split
from .wrapped import Wrapped

COUNTS = "class_counts"
"""The training column (n, classes), int32: of each row, the training rows of each class that its client has."""
FLOOR = 1e-8
"""What a class without rows counts."""
MOST_BYTES = 1 << 30
"""The most bytes of this column."""


@dataclass(frozen=True)
class Calibrated(Wrapped):
    """`of`: the inner workload. `kind`: what is added to the logits (fedlc, balanced). `tau`: the strength of fedlc.
    `absent`: a class that the client lacks counts almost nothing (floor) or leaves the denominator (exclude). `over`:
    the denominator has all classes (all), or all but the row's own (others)."""

    kind: Literal["fedlc", "balanced"] = "fedlc"
    tau: float = 1.0
    absent: Literal["floor", "exclude"] = "floor"
    over: Literal["all", "others"] = "all"

    def __post_init__(self) -> None:
        check_finite_from(self, tau=0)
        if self.kind == "balanced" and self.tau != 1:
            raise ValueError(f"tau is the strength of fedlc, got tau={self.tau} with kind=balanced; leave it out")

    def check(self) -> None:
        super().check()
        inner = self._inner
        if not hasattr(inner, "classes") or not isinstance(getattr(inner, "objective", Classes(1)), Classes):
            raise ValueError(
                f"calibrated needs the column label with class numbers, got {type(self.of).__name__}; choose another "
                "workload"
            )

    def prepared(self, split: Split) -> Split:
        """Adds the column "class_counts"."""
        split = self.of.prepared(split)
        label, own, classes = split.train["label"], split.client_index.whole, self._inner.classes
        if (size := 4 * len(label) * classes) > MOST_BYTES:
            raise ValueError(
                f"calibrated keeps {classes} counts for each of {len(label):,} rows, got {size:,} bytes and has up to "
                f"{MOST_BYTES:,}; choose a workload with fewer rows or classes"
            )
        owner = np.repeat(np.arange(len(own.sizes)), own.sizes)
        counts = np.zeros((len(own.sizes), classes), dtype=np.int32)
        np.add.at(counts, (owner, label[own.rows].astype(np.int64)), 1)
        lone = np.flatnonzero((counts > 0).sum(1) == 1)
        if self.absent == "exclude" and self.over == "others" and len(lone):
            raise ValueError(
                f"over=others with absent=exclude needs two classes of every client, got one of client {lone[0]}; "
                "choose absent: floor"
            )
        column = np.ones((len(label), classes), dtype=np.int32)  # other rows are not trained on
        column[own.rows] = counts[owner]
        return split._replace(train={**split.train, COUNTS: column})

    def losses(self, p: Params, batch: Batch) -> Tensor:
        if COUNTS not in batch:
            return self.of.losses(p, batch)
        logits, label = wide(self._inner.logits(p, batch, batch.get("key"))), batch["label"].long()
        is_own = torch.arange(logits.shape[-1], device=logits.device) == label.unsqueeze(-1)
        counts = batch[COUNTS].to(logits.dtype)
        z = logits + self.shift(torch.where(is_own, counts.clamp(min=FLOOR), counts))
        own = z.gather(-1, label.unsqueeze(-1)).squeeze(-1)
        if self.over == "others":
            z = torch.where(is_own, -torch.inf, z)
        losses = z.logsumexp(-1) - own
        return losses + self._network.drift(p) if self.buffers and "key" in batch else losses

    def shift(self, counts: Tensor) -> Tensor:
        """(B, classes) what is added to the logits of rows with these counts (B, classes)."""
        known = counts.clamp(min=FLOOR)
        shift = known.log() if self.kind == "balanced" else -self.tau * known**-0.25
        return torch.where(counts > 0, shift, -torch.inf) if self.absent == "exclude" else shift

    @property
    def _inner(self) -> Any:
        return self.of

    @property
    def _network(self) -> Any:
        """The network of the innermost workload."""
        inner: Any = self.of
        while not hasattr(inner, "network"):
            inner = inner.of
        return inner.network

"""Classification in which an adversary chooses the weights of the classes: a min-max problem over any classification
workload.

    F = l (1 + a_c - mean of a) - strength |a|^2 / 2        l: cross-entropy of an example, c: its class
    min over primal.net.…; max over dual.a, (classes,), which begins at 0

Let pi_c be the share and L_c the mean cross-entropy of class c, L = sum of pi_c L_c, and C the number of classes. The
best a_c is (pi_c L_c - L / C) / strength, and F is then L + sum over c of (pi_c L_c - L / C)^2 / (2 strength), a
penalty on the differences between the classes. F is strongly concave in the dual. This is the chi-squared form of
distributionally robust learning (Namkoong and Duchi 2017, arXiv:1610.02581) without the constraint that weights are
positive, which holds by itself unless `strength` is small. With a linear network it is robust logistic regression.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from ..data.digits import Digits
from ..models.small import Logistic
from ..objectives import cross_entropy
from ..workload import Batch, Columns, Params, Workload
from .minimax import OverClassification

WEIGHTS = "dual.a"


@dataclass(frozen=True)
class Robust(OverClassification):
    """`of`: the classification workload. `strength`: the larger it is, the closer the weights of the classes are to
    1."""

    of: Workload = Digits(model=Logistic())
    strength: float = 1.0

    whole: ClassVar[tuple[str, ...]] = ("label", "right")  # pyright: ignore[reportIncompatibleVariableOverride]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.strength < inf:
            raise ValueError(f"0 < strength < infinity must hold, got strength={self.strength}")

    def others(self) -> dict[str, Tensor]:
        return {WEIGHTS: torch.zeros(self.classes)}

    def objectives(self, p: Params, batch: Batch) -> Tensor:
        return self.weighed(p, batch, cross_entropy(self.logits(p, batch), batch["label"]))

    def weighed(self, p: Params, batch: Batch, losses: Tensor) -> Tensor:
        """(B,): F of each example. losses: (B,) cross-entropies."""
        a = p[WEIGHTS]
        weight = 1 + a[batch["label"]] - a.mean()
        return losses * weight - self.strength / 2 * a.square().sum()

    def metrics(self, p: Params, batch: Batch) -> dict[str, Tensor]:
        logits, label = self.logits(p, batch), batch["label"]
        loss = cross_entropy(logits, label)
        right = logits.argmax(-1) == label
        means = {"loss": self.weighed(p, batch, loss), "cross_entropy": loss, "accuracy": right.to(loss.dtype)}
        return {**means, "label": label, "right": right}

    def summary(self, means: Mapping[str, float], columns: Columns) -> dict[str, float]:
        """`worst_class`: the accuracy on the class where it is lowest."""
        right, label = columns["right"], columns["label"]
        return {"worst_class": float(min(right[label == one].mean() for one in np.unique(label)))}

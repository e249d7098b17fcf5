"""Any classification workload in which the clients' labels are wrong at different rates.

    symmetric   a wrong label is any other class, each with the same probability
    pair        a wrong label is the next class, l + 1 modulo C; Han et al. 2018 (Co-teaching), arXiv:1804.06872

`share` of the clients are noisy, drawn at random, and each of them draws its rate from [low, high] uniformly. Xu et al.
2022 (FedCorr), arXiv:2204.04677, have noisy clients with rates from [low, 1] and symmetric noise, where the class of
a wrong label may be the true one. Training sees the wrong labels;
reports are on the true ones, also on rows that clients hold out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from .. import counted
from ..workload import Batch, Split
from .wrapped import OtherRows

TRUE = "true_label"
"""The training column with the labels before noise."""


@dataclass(frozen=True)
class LabelNoise(OtherRows):
    """`of`: the inner workload. `kind`: what a wrong label is, any other class (symmetric) or the next one (pair).
    `low`, `high`: the range of a noisy client's rate, the probability that one of its labels is wrong. `share`: the
    share of the clients that are noisy."""

    kind: Literal["symmetric", "pair"] = "symmetric"
    low: float = 0.0
    high: float = 0.4
    share: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in ("symmetric", "pair"):
            raise ValueError(f"kind must be symmetric or pair, got kind={self.kind!r}")
        if not 0 <= self.low <= self.high <= 1:
            raise ValueError(f"0 <= low <= high <= 1 must hold, got low={self.low}, high={self.high}")
        if not 0 <= self.share <= 1:
            raise ValueError(f"0 <= share <= 1 must hold, got share={self.share}")

    def check(self) -> None:
        super().check()
        if getattr(self.of, "classes", None) is None:
            raise ValueError(
                f"label_noise needs a workload with labels and classes, got {type(self.of).__name__}; choose another "
                "workload"
            )

    def rates(self, seed: int, clients: int) -> np.ndarray:
        """(clients,) the probability that a label of each client is wrong."""
        random = counted.numpy_generator(seed, "label noise")
        noisy = random.permutation(clients) < round(self.share * clients)
        return np.where(noisy, random.uniform(self.low, self.high, clients), 0.0)

    def differences(self, seed: int, clients: int) -> dict[str, np.ndarray]:
        return {**self.of.differences(seed, clients), "label noise": self.rates(seed, clients)}

    def split(self, seed: int, clients: int) -> Split:
        """Adds the column "true_label"."""
        split = self.of.split(seed, clients)
        true, rows = split.train["label"], split.client_index.rows
        rate = np.repeat(self.rates(seed, clients), split.client_index.sizes)
        draws = counted.uniform(counted.key(seed, "label noise", torch.from_numpy(rows)), 2).numpy()
        further = 1 if self.kind == "pair" else 1 + (draws[:, 1] * (self.classes - 1)).astype(np.int64)
        seen = true.copy()
        seen[rows] = np.where(draws[:, 0] < rate, (true[rows] + further) % self.classes, true[rows])
        return split._replace(train={**split.train, "label": seen, TRUE: split.train.get(TRUE, true)})

    def reported(self, batch: Batch) -> Batch:
        return super().reported({**batch, "label": batch[TRUE]} if TRUE in batch else batch)

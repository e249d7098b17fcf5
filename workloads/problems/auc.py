"""Deep AUC maximisation, a min-max problem, over any classification workload: one class against the rest.

Liu, Yuan, Ying, Yang, ICLR 2020 (the square loss on pairs); Zhang, Gao 2025, arXiv:2511.04456, equation 20. With the
score h of an example, I+ and I- for a positive and a negative, pi the share of positives,

    F = (1 - pi) (h - w1)^2 I+ + pi (h - w2)^2 I- + 2 (1 + w3) (pi h I- - (1 - pi) h I+) - pi (1 - pi) w3^2

    min over primal.net.…, primal.w1, primal.w2; max over dual.w3; w1, w2 and w3 are numbers () that begin at 0

If the share of positives in a client's rows is pi and the scores are fixed, the best w1 and w2 are the mean scores m+
and m- of the two classes, the best w3 is m- - m+, and F is then pi (1 - pi) (E (1 - h+ + h-)^2 - 1), E over pairs. If
that share is q and not pi, the best w3 is (1 - q) / (1 - pi) m- - q / pi m+.

The paper does not say over which examples pi is taken. prior = "global" takes the examples of all clients together,
which makes the mean of the clients' objectives, weighted by their sizes, one global objective; "local" takes those of
each client. pi is never taken over a batch. The score is the softmax probability of the positive class, in [0, 1], or
its logit through a sigmoid, or its logit. The AUC is exact, over the whole test set. The partition `positive_ratio`
makes positives rare; the frozen word vectors of the paper are `embeddings: frozen`. Around label_noise, pi is that of
the labels that training sees.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from .. import metrics
from ..client_index import ClientIndex
from ..data.digits import Digits
from ..partitions.skew import PositiveRatio
from ..workload import Batch, Columns, Params, Split, Workload
from .minimax import OverClassification

SCALARS = ("primal.w1", "primal.w2", "dual.w3")


@dataclass(frozen=True)
class Auc(OverClassification):
    """`of`: the classification workload. `positive`: the class that is ranked above all others. `prior`, `score`: see
    the module."""

    of: Workload = Digits()
    positive: int = 1
    prior: Literal["global", "local"] = "global"
    score: Literal["softmax", "sigmoid", "logit"] = "softmax"

    whole: ClassVar[tuple[str, ...]] = ("score", "positive")  # pyright: ignore[reportIncompatibleVariableOverride]

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, known in (("prior", ("global", "local")), ("score", ("softmax", "sigmoid", "logit"))):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}")
        rare = self.base.partition
        if isinstance(rare, PositiveRatio) and rare.positive != self.positive:
            raise ValueError(
                f"positive must be the same as in the partition, got {self.positive} and {rare.positive}; "
                "set workload.of.partition.positive"
            )

    def check(self) -> None:
        super().check()
        if not 0 <= self.positive < self.classes:  # only the data of a table say how many classes there are
            raise ValueError(f"0 <= positive < {self.classes} must hold, got positive={self.positive}")

    def others(self) -> dict[str, Tensor]:
        return {name: torch.zeros(()) for name in SCALARS}

    def split(self, seed: int, clients: int) -> Split:
        """Adds the column "prior", (n,) float64: pi for each example. Test examples have the share of positives among
        all training examples."""
        split = self.of.split(seed, clients)
        label, client_index = split.train["label"], split.client_index
        own, pooled = priors(label == self.positive, client_index)
        check_both(own if self.prior == "local" else np.array([pooled]))
        prior = np.full(len(label), pooled)
        if self.prior == "local":
            prior[client_index.rows] = np.repeat(own, client_index.sizes)
        test = {**split.test, "prior": np.full(len(split.test["label"]), pooled)}
        return split._replace(train={**split.train, "prior": prior}, test=test)

    def scores(self, p: Params, batch: Batch) -> Tensor:
        """(B,): the score of each example."""
        logits = self.logits(p, batch)
        if self.score == "softmax":
            return logits.softmax(-1)[..., self.positive]
        chosen = logits[..., self.positive]
        return chosen.sigmoid() if self.score == "sigmoid" else chosen

    def objectives(self, p: Params, batch: Batch) -> Tensor:
        return self.terms(p, batch, self.scores(p, batch))

    def terms(self, p: Params, batch: Batch, h: Tensor) -> Tensor:
        """(B,): F of each example, from its score in h (B,)."""
        w1, w2, w3 = (p[name] for name in SCALARS)
        pi, positive = batch["prior"].to(h.dtype), (batch["label"] == self.positive).to(h.dtype)
        negative = 1 - positive
        near = (1 - pi) * (h - w1).square() * positive + pi * (h - w2).square() * negative
        apart = 2 * (1 + w3) * h * (pi * negative - (1 - pi) * positive)
        return near + apart - pi * (1 - pi) * w3.square()

    def metrics(self, p: Params, batch: Batch) -> dict[str, Tensor]:
        h = self.scores(p, batch)
        found = {"loss": self.terms(p, batch, h), "score": h, "positive": batch["label"] == self.positive}
        return {**found, **{name.partition(".")[2]: p[name].to(h.dtype).expand_as(h) for name in SCALARS}}

    def summary(self, means: Mapping[str, float], columns: Columns) -> dict[str, float]:
        """`auc`, and `w_gap`: the largest distance of w1, w2 and w3 from their best values for the scores; empty if the
        test rows are all positive or all negative."""
        scores, positive = columns["score"].astype(np.float64), columns["positive"]
        if positive.all() or not positive.any():
            return {}
        best = optimum(scores, positive, float(positive.mean()))
        gap = max(abs(means[name] - value) for name, value in zip(("w1", "w2", "w3"), best, strict=True))
        return {"auc": metrics.auc(scores, positive), "w_gap": gap}


def priors(positive: np.ndarray, client_index: ClientIndex) -> tuple[np.ndarray, float]:
    """(share of positives in the rows of each client, (N,); share in the rows of all clients). positive: (n,) bool.

    The share is NaN for a client without rows, which the engine refuses later.
    """
    counts = np.concatenate([[0], np.cumsum(positive[client_index.rows])])  # of positives before each place in `rows`
    sums, sizes = np.diff(counts[client_index.offsets]), client_index.sizes
    own = np.divide(sums, sizes, out=np.full(len(sizes), np.nan), where=sizes > 0)
    return own, float(counts[-1] / max(len(client_index.rows), 1))


def check_both(shares: np.ndarray) -> None:
    """Raise ValueError unless all shares of positives, (k,), lie strictly between 0 and 1."""
    one = np.flatnonzero((shares <= 0) | (shares >= 1))
    if len(one):
        where = f"client {one[0]}" if len(shares) > 1 else "the training set"
        raise ValueError(
            f"both classes must occur where pi is taken, got a share of {shares[one[0]]:g} positives in {where}; set "
            "prior=global, choose another positive class, or lower federation.clients"
        )


def optimum(h: np.ndarray, positive: np.ndarray, prior: float) -> tuple[float, float, float]:
    """The best (w1, w2, w3) for scores h (n,), labels positive (n,) bool, and pi = prior."""
    high, low, q = float(h[positive].mean()), float(h[~positive].mean()), float(positive.mean())
    return high, low, (1 - q) / (1 - prior) * low - q / prior * high

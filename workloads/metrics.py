"""Measures of a whole test set, which no mean over examples gives."""

from __future__ import annotations

import math

import numpy as np


def auc(scores: np.ndarray, positive: np.ndarray) -> float:
    """The area under the ROC curve: the share of pairs (positive, negative) ranked rightly, ties counting a half.

    Exact: by the mean ranks of Mann and Whitney, in n log n. scores: (n,); positive: (n,) bool.
    """
    positive = np.asarray(positive, dtype=bool)
    many, rest = int(positive.sum()), int((~positive).sum())
    if not many or not rest:
        raise ValueError(f"both classes must occur, got {many} positives and {rest} negatives")
    _, place, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = np.cumsum(counts) - (counts - 1) / 2  # of each value, from 1
    return float((ranks[place][positive].sum() - many * (many + 1) / 2) / (many * rest))


def perplexity(loss: float) -> float:
    """exp of a mean cross-entropy in nats; infinite where no float is so large."""
    return math.exp(loss) if loss < 709 else math.inf

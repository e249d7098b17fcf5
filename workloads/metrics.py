"""Metrics of a whole test set that are not means over its examples."""

from __future__ import annotations

import math

import numpy as np


def auc(scores: np.ndarray, positive: np.ndarray) -> float:
    """The area under the ROC curve: the share of pairs (positive, negative) that the scores order correctly; a tie
    counts one half.

    It is exact, by the mean ranks of Mann and Whitney, in time n log n. scores: (n,); positive: (n,) bool. Raises
    ValueError unless both classes occur.
    """
    positive = np.asarray(positive, dtype=bool)
    many, rest = int(positive.sum()), int((~positive).sum())
    if not many or not rest:
        raise ValueError(f"both classes must occur, got {many} positives and {rest} negatives")
    _, place, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = np.cumsum(counts) - (counts - 1) / 2  # the mean rank of each value, from 1
    return float((ranks[place][positive].sum() - many * (many + 1) / 2) / (many * rest))


LARGEST_LOSS = 709
"""The loss from which on a perplexity exceeds the floats."""


def perplexity(loss: float) -> float:
    """exp(loss), for a mean cross-entropy in nats; infinity if that exceeds the floats."""
    return math.exp(loss) if loss < LARGEST_LOSS else math.inf


def perplexities(losses: np.ndarray) -> np.ndarray:
    """(c,): `perplexity` of each loss, NaN of NaN."""
    return np.where(losses < LARGEST_LOSS, np.exp(np.minimum(losses, LARGEST_LOSS)), losses + np.inf)

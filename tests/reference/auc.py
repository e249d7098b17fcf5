"""The square-loss AUC objective and its closed forms, numpy float64.

Section 1; Liu et al. 2020; Zhang, Gao 2025, arXiv:2511.04456, equation 20.

`h`: scores (B,); `positive`: booleans (B,); `prior`: the share of positives in the loss, pi; `w`: (w1,
w2, w3), the last is the dual.
"""

import numpy as np


def loss(h, positive, w, prior):
    """F, term by term: the mean over all B samples, and the term without data once."""
    (w1, w2, w3), total = w, 0.0
    for score, is_positive in zip(h, positive, strict=True):
        if is_positive:
            total += (1 - prior) * (score - w1) ** 2 - 2 * (1 + w3) * (1 - prior) * score
        else:
            total += prior * (score - w2) ** 2 + 2 * (1 + w3) * prior * score
    return total / len(h) - prior * (1 - prior) * w3**2


def gradient(h, positive, w, prior):
    """dF/dh (B,), dF/dw (3,)."""
    (w1, w2, w3), size = w, len(h)
    dh, d1, d2, d3 = np.zeros(size), 0.0, 0.0, -2 * prior * (1 - prior) * w3
    for j, (score, is_positive) in enumerate(zip(h, positive, strict=True)):
        if is_positive:
            dh[j] = 2 * (1 - prior) * ((score - w1) - (1 + w3)) / size
            d1 -= 2 * (1 - prior) * (score - w1) / size
            d3 -= 2 * (1 - prior) * score / size
        else:
            dh[j] = 2 * prior * ((score - w2) + (1 + w3)) / size
            d2 -= 2 * prior * (score - w2) / size
            d3 += 2 * prior * score / size
    return dh, np.array([d1, d2, d3])


def share(positive):
    """The share of positives among the examples."""
    return float(np.mean(positive))


def saddle(h, positive, prior=None):
    """w* (3,) for fixed scores; prior None: the empirical share q. Else w3* where the two differ."""
    high, low, q = h[positive].mean(), h[~positive].mean(), share(positive)
    prior = q if prior is None else prior
    return np.array([high, low, (1 - q) / (1 - prior) * low - q / prior * high])


def curvatures(positive, prior):
    """Second derivatives in w1, w2 and w3 (the last negative)."""
    q = share(positive)
    return 2 * (1 - prior) * q, 2 * prior * (1 - q), -2 * prior * (1 - prior)


def value(h, positive):
    """min max F at the empirical share: pi (1 - pi) (V+ + V- + (1 + mu- - mu+)^2 - 1), variances with 1/n."""
    q, high, low = share(positive), h[positive], h[~positive]
    return q * (1 - q) * (high.var() + low.var() + (1 + low.mean() - high.mean()) ** 2 - 1)


def pairwise(h, positive):
    """The same as a mean over pairs: pi (1 - pi) (E (1 - h+ + h-)^2 - 1)."""
    q = share(positive)
    pairs = [(1 - high + low) ** 2 for high in h[positive] for low in h[~positive]]
    return q * (1 - q) * (sum(pairs) / len(pairs) - 1)


def aucm(h, positive, w1, w2, alpha, prior, margin=1.0):
    """Yuan et al. 2021: F(w3) + pi (1 - pi) is this at alpha = 1 + w3 and margin 1. No bound on alpha here."""
    total = 0.0
    for score, is_positive in zip(h, positive, strict=True):
        square = (1 - prior) * (score - w1) ** 2 if is_positive else prior * (score - w2) ** 2
        ranked = -(1 - prior) * score if is_positive else prior * score
        total += square + 2 * alpha * ranked
    return total / len(h) + 2 * alpha * prior * (1 - prior) * margin - prior * (1 - prior) * alpha**2


def pooled_prior(ratios):
    """The share of positives of all clients together when each has the same number of negatives and its own ratio."""
    positives = float(np.mean([r / (1 - r) for r in ratios]))
    return positives / (1 + positives)

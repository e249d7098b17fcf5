"""BiClip in numpy, written from the formulas of Lee, Zaheer, Li, ICML 2025 (TailOPT), arXiv:2502.04164.

Thresholds 0 <= d <= u. Coordinates: sign(z) min(u, max(d, |z|)). Norm: z min(u, max(d, |z|)) / |z|, |z| over the whole
model; 0 stays 0.
"""

import numpy as np

from tests.reference.trees import add, mean, norm, times


def biclip(z, d, u, mode="coordinate"):
    if mode == "coordinate":
        return {name: np.sign(v) * np.minimum(u, np.maximum(d, np.abs(v))) for name, v in z.items()}
    size = norm(z)
    return z if size == 0 else times(z, min(u, max(d, size)) / size)


class BiClip:
    """y <- y - lr BiClip(g), then y <- (1 - lr decay) y."""

    def __init__(self, lr, d, u, mode="coordinate", weight_decay=0.0):
        self.lr, self.d, self.u, self.mode, self.weight_decay = lr, d, u, mode, weight_decay

    def start(self, x):
        return {}

    def step(self, y, g, state):
        y = add(y, biclip(g, self.d, self.u, self.mode), -self.lr)
        return times(y, 1 - self.lr * self.weight_decay), {}


class BiClipServer:
    """x <- x + lr BiClip(mean delta)."""

    def __init__(self, lr, d, u, mode="coordinate"):
        self.lr, self.d, self.u, self.mode = lr, d, u, mode

    def step(self, x, deltas):
        return add(x, biclip(mean(deltas), self.d, self.u, self.mode), self.lr)

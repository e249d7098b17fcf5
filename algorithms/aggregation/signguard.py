"""SignGuard: messages whose norms are ordinary and whose shares of signs lie in the largest cluster.

Xu et al., ICDCS 2022, arXiv:2109.05872. With M the median norm:

    A = {i: low M < |x_i| < high M}
    C = the largest cluster, by mean shift, of (share of positive, zero, negative values) on a window of coordinates
    answer: the mean over A and C of the rows, shortened to norm M; 0 if there is none
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ...workloads import counted
from .contract import Aggregator
from .messages import Answer, Messages, shortening

SHIFTS = 300
"""The largest number of shifts of a centre."""


@dataclass(frozen=True, kw_only=True)
class SignGuard(Aggregator):
    """low, high: bounds of a norm in units of the median norm. share: of the coordinates whose signs are counted, a
    window of consecutive ones with a start that is drawn in each round."""

    low: float = 0.1
    high: float = 3.0
    share: float = 0.1

    called: ClassVar[str] = "SignGuard"

    def __post_init__(self) -> None:
        if not (0 <= self.low < self.high and 0 < self.share <= 1):
            raise ValueError(
                f"0 <= low < high and 0 < share <= 1 must hold, got low={self.low}, high={self.high}, "
                f"share={self.share}"
            )

    def window(self, x: Messages) -> slice:
        """The coordinates whose signs are counted in this round."""
        size = max(1, int(self.share * x.length))
        start = counted.numpy_generator(int(x.key), "window").integers(x.length - size + 1)
        return slice(int(start), int(start) + size)

    def aggregate(self, x: Messages) -> Answer:
        window, norms, middle = self.window(x), x.norms, float(np.median(x.norms))
        ordinary = (self.low * middle < norms) & (norms < self.high * middle)
        shares = x.signs(window) / (window.stop - window.start)
        features = shares / (shares.max(axis=0) + 1e-8)
        kept = ordinary & largest_cluster(features)
        if not kept.any():
            return x.sum(np.zeros(x.count))
        return x.average(kept, shortening(norms, middle))


def largest_cluster(features: np.ndarray) -> np.ndarray:
    """(S,) bool: which rows are in the largest cluster by mean shift with a flat kernel.

    The bandwidth is the mean over the rows of the distance to the floor(S/2)-th nearest row, the row itself counted.
    Every row is a seed. Centres are taken by the number of rows within the bandwidth, then by position; one within the
    bandwidth of a centre that was taken is left out.
    """
    count = len(features)
    apart = np.sort(distances(features, features), axis=1)
    bandwidth = max(1e-12, float(apart[:, max(1, count // 2) - 1].mean()))
    centres = np.stack([shifted(seed, features, bandwidth) for seed in features])
    sizes = (distances(centres, features) <= bandwidth).sum(axis=1)
    taken: list[int] = []
    for place in np.argsort(-sizes, kind="stable"):
        if not taken or distances(centres[taken], centres[place : place + 1]).min() > bandwidth:
            taken.append(int(place))
    to_centres = distances(features, centres[taken])
    label = np.where(to_centres.min(axis=1) <= bandwidth, to_centres.argmin(axis=1), -1)
    members = [(label == number).sum() for number in range(len(taken))]
    return label == int(np.argmax(members))


def shifted(centre: np.ndarray, features: np.ndarray, bandwidth: float) -> np.ndarray:
    """The centre moved to the mean of the rows within the bandwidth, until it stays."""
    for _ in range(SHIFTS):
        near = distances(centre[None], features)[0] <= bandwidth
        if not near.any():
            return centre
        after = features[near].mean(axis=0)
        moved, centre = float(np.sqrt(np.square(after - centre).sum())), after
        if moved <= 1e-3 * bandwidth:
            break
    return centre


def distances(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """(m, n): the distances of the rows of a and b."""
    return np.sqrt(np.square(a[:, None] - b[None]).sum(axis=2))

"""MDA, minimum-diameter averaging: the mean of the S - f messages whose largest distance from each other is least.

Rousseeuw 1985; El Mhamdi et al., 2020. Among several such sets it is the first in lexicographic order.

A set has a diameter of at most sqrt(t) if the other rows cover all pairs with D_ij > t, where D_ij is their squared
distance. The least t for which f rows cover them is found by bisection over the values of D. Whether f rows suffice is
decided by branching on an uncovered pair, 2^f leaves at most; no list of all C(S, f) sets is made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from .contract import FewerThanHalf
from .messages import Answer, Messages

MOST = 20
"""The greatest f: the search takes up to 2^f steps."""


@dataclass(frozen=True, kw_only=True)
class Mda(FewerThanHalf):
    """f: the number of messages that are left out."""

    pairwise: ClassVar[bool] = True
    called: ClassVar[str] = "MDA"

    def refuses(self, rows: int, f: int) -> str:
        return f"mda searches up to 2^f sets, got f={f}; use multi_krum, or f <= {MOST}" if f > MOST else ""

    def aggregate(self, x: Messages) -> Answer:
        return x.average(least_diameter(x.distances2, x.f))


def least_diameter(distances2: np.ndarray, f: int) -> np.ndarray:
    """The positions of the S - f rows of least diameter, in ascending order."""
    values = np.unique(np.triu(distances2, 1))
    low, high = 0, len(values) - 1
    while low < high:
        middle = (low + high) // 2
        if coverable(distances2 > values[middle], f):
            high = middle
        else:
            low = middle + 1
    far = distances2 > values[low]
    kept: list[int] = []
    left = f  # rows that may still be left out
    alive = np.ones(len(far), dtype=bool)
    for row in range(len(far)):
        if len(kept) == len(far) - f:
            break
        if not alive[row]:
            continue
        forced = far[row] & alive  # who must go if this row stays
        rest = alive & ~forced
        rest_of = far[np.ix_(rest, rest)]
        if forced.sum() <= left and not forced[kept].any() and coverable(rest_of, left - int(forced.sum())):
            kept.append(row)
            alive, left = rest, left - int(forced.sum())
        else:
            alive[row] = False
            left -= 1
    return np.array(kept)


def coverable(far: np.ndarray, most: int) -> bool:
    """Whether `most` rows suffice to cover all pairs that are far apart. far: (S, S), symmetric."""
    degrees = far.sum(axis=1)
    row = int(np.argmax(degrees)) if len(degrees) else 0
    if not len(degrees) or degrees[row] == 0:
        return True
    if most <= 0 or degrees.sum() > 2 * most * degrees[row]:
        return False
    others = np.flatnonzero(far[row])
    for out in (np.array([row]), others):
        if len(out) <= most:
            rest = np.ones(len(far), dtype=bool)
            rest[out] = False
            if coverable(far[np.ix_(rest, rest)], most - len(out)):
                return True
    return False

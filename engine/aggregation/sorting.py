"""Columns in ascending order, by a sorting network.

A network is a fixed list of comparisons. Each of them is one minimum and one maximum over all columns at once, so that
a processor does sixteen of them in one instruction, which is much faster than sorting each column.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

AT_ONCE = 4096
"""Columns that are sorted together, so that their rows stay in the second-level cache."""


@lru_cache(16)
def network(count: int) -> tuple[tuple[int, int], ...]:
    """The comparisons (i, j), i < j, that sort `count` values: Batcher's odd-even merge sort (Knuth, volume 3, 5.2.2,
    algorithm M)."""
    found = []
    levels = max(count - 1, 0).bit_length()
    p = 1 << levels >> 1
    while p > 0:
        q, r, d = 1 << levels >> 1, 0, p
        while True:
            found += [(i, i + d) for i in range(count - d) if i & p == r]
            if q == p:
                break
            d, q, r = q - p, q >> 1, p
        p >>= 1
    return tuple(found)


def sort_columns(x: np.ndarray) -> np.ndarray:
    """(S, C): the columns of x, each in ascending order. -0 becomes 0. x has no NaN; it may be overwritten."""
    x += 0.0
    for begin in range(0, x.shape[1], AT_ONCE):
        part = x[:, begin : begin + AT_ONCE]
        rows = [row.copy() for row in part]
        spare = np.empty(part.shape[1], dtype=x.dtype)
        for i, j in network(len(rows)):
            low, high = rows[i], rows[j]
            np.minimum(low, high, out=spare)
            np.maximum(low, high, out=high)
            rows[i], spare = spare, low
        for target, row in zip(part, rows, strict=True):
            target[:] = row
    return x

"""Krum, Multi-Krum, MDA and Bulyan after nearest-neighbour mixing in exact arithmetic: where scores or distances are
equal, they are equal here, and the lower position of a row decides. Rows are lists of fractions; f as in
`robust_rules`."""

from fractions import Fraction
from itertools import combinations


def distances(x):
    return [[sum((a - b) ** 2 for a, b in zip(one, other, strict=True)) for other in x] for one in x]


def nnm(x, f):
    """Every row becomes the mean of the S - f rows that are nearest to it, itself first."""
    d, keep = distances(x), len(x) - f
    found = []
    for i in range(len(x)):
        near = sorted(range(len(x)), key=lambda j, i=i: (d[i][j] if j != i else -1, j))[:keep]
        found.append([sum(x[j][p] for j in near) / Fraction(keep) for p in range(len(x[0]))])
    return found


def krum_order(x, f, less=1):
    """The positions of all rows, the best first. less: neighbours are S - f - less."""
    d, q = distances(x), max(1, len(x) - f - less)
    scores = [sum(sorted(row[:i] + row[i + 1 :])[:q]) for i, row in enumerate(d)]
    return sorted(range(len(x)), key=lambda i: (scores[i], i))


def mda(x, f):
    """The positions of the rows that are kept."""
    d = distances(x)
    sets = combinations(range(len(x)), len(x) - f)
    return min(sets, key=lambda rows: (max(d[i][j] for i, j in combinations(rows, 2)), rows))


def bulyan(x, f):
    """The positions of the chosen rows in their order."""
    left, chosen = list(range(len(x))), []
    for _ in range(len(x) - 2 * f):
        chosen.append(left.pop(krum_order([x[i] for i in left], f, 2)[0]))
    return chosen

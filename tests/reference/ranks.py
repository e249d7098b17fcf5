"""Sizes of factors for a compression ratio, and their numbers of parameters, in exact arithmetic without numpy.

Ratios are `Fraction`s or floats taken exactly. Li et al. 2025: the rank rule counts r (m + n) of m n entries, as their
program does; the printed 2 (m + n) r / (m n) is twice that.
"""

import math
from fractions import Fraction

from tests.reference.lowrank import sides


def at_least_root(value, degree):
    """The smallest z >= 1 with z^degree >= value."""
    z = 1
    while z**degree < value:
        z += 1
    return z


def mud_rank(shape, ratio):
    """The rank of FedMUD, AAD and (here) FedHM: max(1, ceil(ratio m n / (m + n)))."""
    m, n = sides(shape)
    return max(1, math.ceil(Fraction(ratio) * m * n / (m + n)))


def frozen_rank(shape, ratio):
    """The rank if only V (n, r) is sent: ceil(ratio m)."""
    return max(1, math.ceil(Fraction(ratio) * sides(shape)[0]))


def blocks(shape, ratio, frozen=False):
    """(q, z): q = ceil(ratio^2 m n / 4), without the 4 where only V is sent; z = ceil((m n / q)^1/4)."""
    m, n = sides(shape)
    q = max(1, math.ceil(Fraction(ratio) ** 2 * m * n / (1 if frozen else 4)))
    return q, at_least_root(Fraction(m * n, q), 4)


def grid_blocks(shape, k):
    """(q, z) of the paper's k x k grid."""
    m, n = sides(shape)
    return k * k, at_least_root(Fraction(m * n, k * k), 4)


def lmt_rank(shape, ratio):
    """The rank in FedLMT's paper: round(ratio o)."""
    return round(Fraction(ratio) * shape[0])


def hm_rank(shape, gamma):
    """The rank in FedHM's paper: max(1, round(o / gamma))."""
    return max(1, round(Fraction(shape[0]) / Fraction(gamma)))


def para_rank(shape, ratio, form="tensor", guarantee=False):
    """Inner rank R of FedPara.

    "tensor": the smallest R >= 1 with 2 (R (o + i) + R^2 k^2) >= ratio o i k^2, which is the ceiling of the positive
    root; guarantee=True, as the authors': no less than ceil(sqrt(max(o, i))). "matrix": max(1, floor(ratio m n / (2 (m
    + n)))).
    """
    if form == "matrix" or len(shape) == 2:
        m, n = sides(shape)
        rank = max(1, math.floor(Fraction(ratio) * m * n / (2 * (m + n))))
        return max(rank, at_least_root(max(m, n), 2)) if guarantee else rank
    o, i, kh, kw = shape
    rank = 1
    while 2 * (rank * (o + i) + rank * rank * kh * kw) < Fraction(ratio) * o * i * kh * kw:
        rank += 1
    return max(rank, at_least_root(max(o, i), 2)) if guarantee else rank


# ---------------------------------------------------------------- The paper's networks

WIDTHS = {
    "CNN4": (32, "P", 64, "P", 128, "P", 256, "P"),
    "CNN10": (32, 32, "P", 64, 64, "P", 128, 128, "P", 256, 256, "P", 512, 512, "P"),
    "CNN8": (32, 32, "P", 64, 64, "P", 128, 128, "P", 256, 256, "P"),
}


def network(name, channels, side, classes):
    """(shapes of the weights, parameters of the norms): 3x3 convolutions, the last weight linear, no biases."""
    shapes, norms = [], 0
    for width in WIDTHS[name]:
        if width == "P":
            side //= 2
        else:
            shapes.append((width, channels, 3, 3))
            norms, channels = norms + 2 * width, width
    return [*shapes, (classes, channels * side * side)], norms


def size(shape):
    return math.prod(shape)


def kept(shapes, norms, sent):
    """Parameters trained: first and last weight, norms, and `sent(shape)` of every weight between."""
    return size(shapes[0]) + size(shapes[-1]) + norms + sum(sent(shape) for shape in shapes[1:-1])


def mud_sent(ratio):
    return lambda shape: mud_rank(shape, ratio) * sum(sides(shape))


def frozen_sent(ratio):
    return lambda shape: frozen_rank(shape, ratio) * sides(shape)[1]


def blocks_sent(ratio, frozen=False):
    def sent(shape):
        q, z = blocks(shape, ratio, frozen)
        return (1 if frozen else 2) * q * z * z

    return sent


def para_sent(ratio, form="tensor", guarantee=False):
    def sent(shape):
        rank = para_rank(shape, ratio, form, guarantee)
        if form == "matrix" or len(shape) == 2:
            return 2 * rank * sum(sides(shape))
        return 2 * (rank * (shape[0] + shape[1]) + rank * rank * shape[2] * shape[3])

    return sent


def settle(shapes, norms, ratio, sent, step=Fraction(1, 1000)):
    """(ratio of a layer, real ratio of all): lowered from `ratio` by `step` until the real one is at most ratio + step,
    or the next would not be positive."""
    total = norms + sum(size(shape) for shape in shapes)
    layer = Fraction(ratio)
    while True:
        real = Fraction(kept(shapes, norms, sent(layer)), total)
        if real <= Fraction(ratio) + step or layer - step <= 0:
            return layer, real
        layer -= step

"""Ranks, blocks and real ratios of the paper's networks, compared with those that the authors' program prints."""

from fractions import Fraction

import pytest

from tests.reference import ranks

RATIO = Fraction(1, 32)

TABLE = {
    "FMNIST": (
        ("CNN4", 1, 28, 10), 390_880, [2, 3, 5], 3.04, [(2, 10), (8, 10), (31, 10)], 3.07,
    ),
    "SVHN": (
        ("CNN4", 3, 32, 10), 399_136, [1, 1, 1], 3.53, [(1, 12), (1, 17), (1, 24)], 3.53,
    ),
    "CIFAR-10": (
        ("CNN10", 3, 32, 10), 4_719_328, [2, 2, 3, 4, 6, 8, 12, 15, 23], 3.22,
        [(q, 9) for q in (2, 4, 7, 14, 28, 55, 110, 219, 438)], 3.22,
    ),
    "CIFAR-100": (
        ("CNN10", 3, 32, 100), 4_765_408, [1, 2, 2, 3, 4, 5, 8, 10, 15], 3.14,
        [(q, 10) for q in (1, 2, 4, 8, 16, 31, 61, 121, 242)], 3.22,
    ),
}  # fmt: skip
"""name -> network, parameters, ranks, their real ratio in %, blocks, theirs: the authors' program at 1/32."""


@pytest.mark.parametrize("name", TABLE)
def test_table_of_ranks(name):
    """L12."""
    network, total, expected, low, blocks, kron = TABLE[name]
    shapes, norms = ranks.network(*network)
    assert norms + sum(map(ranks.size, shapes)) == total
    layer, real = ranks.settle(shapes, norms, RATIO, ranks.mud_sent)
    assert [ranks.mud_rank(shape, layer) for shape in shapes[1:-1]] == expected
    assert round(100 * float(real), 2) == low
    layer, real = ranks.settle(shapes, norms, RATIO, ranks.blocks_sent)
    assert [ranks.blocks(shape, layer) for shape in shapes[1:-1]] == blocks
    assert round(100 * float(real), 2) == kron

"""Ranks, blocks and inner ranks of the engine equal the reference's, which computes in exact fractions.

A ratio is the decimal that the user writes: 0.07 is 7 / 100 and not the nearest binary number. So a size must not
change because a product of floating-point numbers differs from a whole number by a rounding error.
"""

import random
from fractions import Fraction

import pytest

from fedfleet.algorithms.parts.compression import Budget
from fedfleet.algorithms.parts.factors import Frozen, Hadamard, Pair, TensorHadamard
from fedfleet.algorithms.parts.matrices import Weight
from fedfleet.algorithms.parts.products import Kronecker, LowRank
from fedfleet.algorithms.tree import Layout
from tests.reference import ranks
from tests.reference.lowrank import sides

RATIOS = [Fraction(k, 100) for k in range(1, 100)] + [Fraction(1, 2**k) for k in range(1, 8)]


def shapes():
    """Shapes whose sides are divisible by decimal ratios, and ordinary ones."""
    drawn = random.Random(0)
    convolutions = [(drawn.choice([10, 20, 50, 64]), drawn.choice([3, 25, 32, 40]), 3, 3) for _ in range(6)]
    return [*convolutions, (100, 100), (200, 50), (400, 120), (84, 30), (1000, 10), (300, 300), (7, 11)]


def weight(shape):
    return Weight("w", shape, *sides(shape))


FORMS = {
    "low rank": (Pair(LowRank()), lambda shape, ratio: (ranks.mud_rank(shape, ratio),)),
    "frozen": (Frozen(LowRank()), lambda shape, ratio: (ranks.frozen_rank(shape, ratio),)),
    "blocks": (Pair(Kronecker()), ranks.blocks),
    "frozen blocks": (Frozen(Kronecker()), lambda shape, ratio: ranks.blocks(shape, ratio, frozen=True)),
    "matrix": (Hadamard(), lambda shape, ratio: (ranks.para_rank(shape, ratio, "matrix"),)),
    "tensor": (TensorHadamard(), lambda shape, ratio: (ranks.para_rank(shape, ratio, "tensor"),)),
}


@pytest.mark.parametrize("name", FORMS)
def test_sizes(name):
    form, wanted = FORMS[name]
    wrong = [
        (shape, str(ratio), form.size(weight(shape), float(ratio)), wanted(shape, ratio))
        for shape in shapes()
        for ratio in RATIOS
        if form.size(weight(shape), float(ratio)) != wanted(shape, ratio)
    ]
    assert not wrong, wrong[:5]


@pytest.mark.parametrize("name", ["low rank", "frozen", "blocks", "frozen blocks"])
@pytest.mark.parametrize(
    "network", [("CNN4", 1, 28, 10), ("CNN4", 3, 32, 10), ("CNN10", 3, 32, 10), ("CNN10", 3, 32, 100)]
)
def test_budgets_of_the_papers_networks(name, network):
    """The sizes and the ratio of a whole model, which is lowered step by step to the requested ratio."""
    form, wanted = FORMS[name]
    made, norms = ranks.network(*network)
    layout = Layout((*(f"w{k}" for k in range(len(made))), "norms"), (*map(tuple, made), (norms,)))
    sent = {
        "low rank": ranks.mud_sent,
        "frozen": ranks.frozen_sent,
        "blocks": ranks.blocks_sent,
        "frozen blocks": lambda ratio: ranks.blocks_sent(ratio, frozen=True),
    }[name]
    for ratio in (Fraction(1, 32), Fraction(1, 16), Fraction(1, 10)):
        layer, real = ranks.settle(made, norms, ratio, sent)
        sized = Budget(float(ratio), nearest=True).fit(layout, form)
        total = sum(layout.sizes)
        ours = (total - sum(s.weight.numbers - s.sent for s in sized)) / total
        if real <= ratio + Fraction(1, 1000):
            assert [s.size for s in sized] == [wanted(shape, layer) for shape in made[1:-1]]
            assert abs(ours - float(real)) < 1e-12

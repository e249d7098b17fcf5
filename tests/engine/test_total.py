"""A task's messages are added up in the order of the tree, to the bit, by all kernels and for all forms of messages."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fedfleet.engine.reduction.accumulator import Accumulator
from fedfleet.engine.reduction.tree import TreeNode, TreeReducer, TreeShape

SIZE = 37


def message(draw: torch.Generator) -> dict[str, torch.Tensor]:
    """A message with numbers of very different sizes, so that another order of sums would give another result."""
    scale = 10.0 ** torch.randint(-6, 6, (SIZE,), generator=draw)
    return {"delta": torch.randn(SIZE, generator=draw) * scale, "more": torch.randn((), generator=draw)}


def outcome(leaves: dict[str, torch.Tensor], loss: float) -> Any:
    norm2 = leaves["delta"].square().sum()
    loss_of_visit = torch.tensor(loss, dtype=torch.float64)
    return SimpleNamespace(message=Leaves(leaves, norm2), loss=loss_of_visit, gradients=2, rms=None)


class Leaves(dict):  # a pytree of two leaves with facts beside them
    def __init__(self, leaves: dict[str, torch.Tensor], norm2: torch.Tensor) -> None:
        super().__init__(leaves)
        self.facts = {"norm2": norm2}


torch.utils._pytree.register_pytree_node(
    Leaves, lambda each: (list(each.values()), tuple(each)), lambda values, names: dict(zip(names, values, strict=True))
)


def slow(blocks: list[list[tuple[dict[str, torch.Tensor], float]]]) -> list[np.ndarray]:
    """The sums by numpy in float64: first within each block, then in the order of the tree."""
    fold: TreeReducer[list[np.ndarray]] = TreeReducer(
        TreeShape([len(blocks)]), lambda a, b: [x + y for x, y in zip(a, b, strict=True)]
    )
    for i, block in enumerate(blocks):
        sums = [np.zeros(SIZE), np.zeros(())]
        for leaves, weight in block:
            sums[0] = sums[0] + weight * leaves["delta"].double().numpy()
            sums[1] = sums[1] + leaves["more"].double().numpy()
        fold.put(TreeNode(0, i), sums)
    return fold.total()


def quick(blocks: list[list[tuple[dict[str, torch.Tensor], float]]], compiled: bool) -> Accumulator:
    state_spec = SimpleNamespace(message=blocks[0][0][0], weighted=[True, False])
    cuts = list(itertools.accumulate(map(len, blocks)))
    total = Accumulator(state_spec, cuts, compiled=compiled)  # pyright: ignore[reportArgumentType]
    for block in blocks:
        for number, (leaves, weight) in enumerate(block):
            total.add_one(outcome(leaves, number + 0.5), np.array([3]), np.array([weight]), only=len(block) == 1)
        total.end_block()
    return total


KINDS = {"lone": [1.0], "weighted": [0.5], "two": [1.0, 1.0], "two weighted": [2.0, 0.25]}  # powers of 2: no rounding


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kinds", [["lone"], ["lone", "weighted"], ["lone", "two"], list(KINDS)], ids="-".join)
@pytest.mark.parametrize("count", [*range(1, 14), 31])
def test_the_order_is_the_trees(count, kinds, compiled, request):
    if compiled:
        request.getfixturevalue("own_kernels")
    draw = torch.Generator().manual_seed(count)
    for turn in range(8):
        pattern = [kinds[int(torch.randint(len(kinds), (), generator=draw))] for _ in range(count)]
        blocks = [[(message(draw), weight) for weight in KINDS[kind]] for kind in pattern]
        (leaves, told), _, _ = quick(blocks, compiled).result()
        for mine, theirs in zip(leaves, slow(blocks), strict=True):
            assert mine.dtype == np.float64
            assert np.array_equal(mine, theirs), (turn, pattern)
        clients = sum(len(block) for block in blocks)
        assert told["steps"] == 3 * clients
        assert told["gradients"] == 6 * clients
        assert told["weight"] == sum(weight for block in blocks for _, weight in block)


def test_other_orders_would_show():
    """This shows that the test above can fail."""
    draw = torch.Generator().manual_seed(0)
    leaves = [message(draw)["delta"].double() for _ in range(7)]
    sums = {tuple(sum(order).tolist()) for order in itertools.islice(itertools.permutations(leaves), 50)}
    assert len(sums) > 1


def test_what_is_known_of_clients_is_in_their_order():
    draw = torch.Generator().manual_seed(0)
    blocks = [[(message(draw), 1.0)] for _ in range(6)]
    _, _, clients = quick(blocks, False).result()
    norms = [float(block[0][0]["delta"].square().sum()) for block in blocks]
    assert clients["norm2"].tolist() == pytest.approx(norms)
    assert clients["loss"].tolist() == [0.5] * 6
    assert clients["steps"].tolist() == [3] * 6

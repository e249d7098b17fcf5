"""Which weights are compressed, and how much: one rule for all methods that compress.

Weights are tensors of two axes and more, in the model's order. layers = "inner" leaves out the first and the last of
them, as in Li et al. 2025 (FedMUD); what is left out, and all vectors, is trained and sent as it is. A convolution (o,
i, h, w) is the matrix (o h) x (i w): "raw" reshapes its memory, as FedMUD's code does, so that a row mixes input
channels; "permuted" moves the axes to (o, h, i, w) first, as FedLMT and FedHM do.

The ratio is numbers sent over numbers of the model, both with all that is left out. It is met as in FedMUD's code: one
ratio for every layer starts at what is asked for, and is lowered by 0.001 until the model's ratio is at most 0.001
above what is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Literal, NamedTuple

from torch import Tensor

from ..tree import Layout
from .checks import one_of, positive_fraction

Layers = Literal["inner", "all"]
Reshape = Literal["raw", "permuted"]
STEP = 0.001


class Weight(NamedTuple):
    """A compressed weight; as a matrix it is `rows` x `cols`."""

    name: str
    shape: tuple[int, ...]
    rows: int
    cols: int

    @property
    def numbers(self) -> int:
        return self.rows * self.cols


class Sized(NamedTuple):
    """A compressed weight with its size. `size`: a rank, or the number of blocks and their side; `sent`: numbers that
    are sent in place of the weight's."""

    weight: Weight
    size: tuple[int, ...]
    sent: int


def compressible(layout: Layout, layers: Layers) -> list[Weight]:
    """The weights that are compressed; ValueError where there are none."""
    one_of("inner", "all", layers=layers)
    found = [(n, s) for n, s in zip(layout.names, layout.shapes, strict=True) if len(s) >= 2]
    kept = found[1:-1] if layers == "inner" else found
    if not kept:
        raise ValueError(
            f"nothing to compress: the model has {len(found)} weights, and layers=inner leaves out the first and the "
            "last; give layers: all, or a deeper model"
        )
    return [Weight(name, shape, *_sides(shape)) for name, shape in kept]


def _sides(shape: tuple[int, ...]) -> tuple[int, int]:
    if len(shape) == 4:
        return shape[0] * shape[2], shape[1] * shape[3]
    return shape[0], prod(shape[1:])


def to_weight(matrix: Tensor, weight: Weight, reshape: Reshape) -> Tensor:
    """A matrix (rows, cols) in the weight's shape."""
    if reshape == "raw" or len(weight.shape) != 4:
        return matrix.reshape(weight.shape)
    o, i, h, w = weight.shape
    return matrix.reshape(o, h, i, w).permute(0, 2, 1, 3)


def to_matrix(tensor: Tensor, weight: Weight, reshape: Reshape) -> Tensor:
    """The inverse of `to_weight`: (rows, cols)."""
    if reshape == "permuted" and len(weight.shape) == 4:
        tensor = tensor.permute(0, 2, 1, 3)
    return tensor.reshape(weight.rows, weight.cols)


def real_ratio(layout: Layout, sized: tuple[Sized, ...]) -> float:
    """Numbers sent over numbers of the model, both with all that is not compressed."""
    total = sum(layout.sizes)
    return (total - sum(s.weight.numbers - s.sent for s in sized)) / total


def fit(
    layout: Layout, weights: list[Weight], ratio: float, size: Callable[[Weight, float], Sized], nearest: bool
) -> tuple[Sized, ...]:
    """The sizes for a ratio. `size`: the sized weight for a layer's ratio; `nearest`: fall back to the smallest
    achievable ratio where `ratio` cannot be reached, else ValueError."""
    positive_fraction(ratio=ratio)
    per_layer, tried = ratio, []
    while per_layer > 0:
        sized = tuple(size(weight, per_layer) for weight in weights)
        tried.append((real_ratio(layout, sized), sized))
        if tried[-1][0] <= ratio + STEP:
            return sized
        per_layer -= STEP
    least, sized = min(tried, key=lambda pair: pair[0])
    if nearest:
        return sized
    names = {weight.name for weight in weights}
    rest = sum(n for name, n in zip(layout.names, layout.sizes, strict=True) if name not in names)
    raise ValueError(
        f"ratio={ratio:g} cannot be reached on this model: {least:.4f} is the smallest achievable ratio, and "
        f"{rest / sum(layout.sizes):.4f} of the model is not compressed; raise ratio, or give nearest: true"
    )

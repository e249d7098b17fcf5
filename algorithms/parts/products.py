"""Products of two small factors that make an m x n matrix: of low rank, or of Kronecker blocks.

LowRank    U V^T, U m x r, V n x r
Kronecker  q blocks U_b (x) V_b, each z^2 x z^2 of two z x z factors, laid out, cut to m n entries, reshaped to m x n

Both are linear in each factor. The sizes are those of the code of Li et al. 2025 (FedMUD): r = ceil(ratio m n / (m +
n)), at least 1 (the paper's text has a 2 too many); z = ceil((m n / q)^(1/4)); q = ceil(ratio^2 m n / 4) blocks
"stacked" one after the other in memory, where the paper lays out q = k^2 of them on a k x k "grid" of z^2 x z^2 tiles.
With one factor fixed and only the other one sent, the same traffic allows r = ceil(ratio m) and q = ceil(ratio^2 m n).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import ceil, isqrt
from typing import Literal

from torch import Tensor

from .checks import one_of
from .matrices import Weight

Size = tuple[int, ...]
Shape = tuple[int, ...]


def up(value: float) -> int:
    """`value`, >= 0, rounded up. A whole number that rounding errors made a little larger is not rounded up, so that a
    ratio of 0.1 means a tenth."""
    return ceil(value * (1 - 1e-12))


class Product(ABC):
    """A product P(U, V) of two factors that makes a weight's matrix, m = `weight.rows` by n = `weight.cols`."""

    @abstractmethod
    def size(self, weight: Weight, ratio: float, sent: int) -> Size:
        """The size with which about `ratio` times the weight's numbers are sent; `sent`: how many of the two factors
        are sent, 1 or 2."""

    @abstractmethod
    def shapes(self, weight: Weight, size: Size) -> tuple[Shape, Shape]:
        """The shapes of U and V."""

    @abstractmethod
    def of(self, u: Tensor, v: Tensor, weight: Weight) -> Tensor:
        """P(u, v), (m, n)."""

    @abstractmethod
    def text(self, size: Size) -> str:
        """The size in words, for a table."""


@dataclass(frozen=True)
class LowRank(Product):
    """U V^T; size: (r,)."""

    def size(self, weight: Weight, ratio: float, sent: int) -> Size:
        if sent == 1:
            return (max(1, up(ratio * weight.rows)),)
        return (max(1, up(ratio * weight.numbers / (weight.rows + weight.cols))),)

    def shapes(self, weight: Weight, size: Size) -> tuple[Shape, Shape]:
        return (weight.rows, size[0]), (weight.cols, size[0])

    def of(self, u: Tensor, v: Tensor, weight: Weight) -> Tensor:
        return u @ v.mT

    def text(self, size: Size) -> str:
        return f"rank {size[0]}"


@dataclass(frozen=True)
class Kronecker(Product):
    """Blocks of Kronecker products; size: (q, z); `layout`: how the blocks lie in the matrix."""

    layout: Literal["stacked", "grid"] = "stacked"

    def __post_init__(self) -> None:
        one_of("stacked", "grid", layout=self.layout)

    def size(self, weight: Weight, ratio: float, sent: int) -> Size:
        blocks = max(1, up(ratio**2 * weight.numbers / sent**2))
        if self.layout == "grid":
            blocks = isqrt(blocks) ** 2
        side = ceil((weight.numbers / blocks) ** 0.25 - 1e-9)  # 16 ** 0.25 is 2, not a little more
        return blocks, side

    def shapes(self, weight: Weight, size: Size) -> tuple[Shape, Shape]:
        blocks, side = size
        return (blocks, side, side), (blocks, side, side)

    def of(self, u: Tensor, v: Tensor, weight: Weight) -> Tensor:
        blocks, side = u.shape[0], u.shape[1]
        tiles = u[:, :, None, :, None] * v[:, None, :, None, :]
        if self.layout == "grid":
            k, edge = isqrt(blocks), side * side
            tiles = tiles.reshape(k, k, edge, edge).transpose(1, 2)
        return tiles.reshape(-1)[: weight.numbers].view(weight.rows, weight.cols)

    def text(self, size: Size) -> str:
        return f"{size[0]} blocks of {size[1]} x {size[1]}"

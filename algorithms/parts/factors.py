"""Forms: how one weight, or the change of one, is made of factors.

Pair            P(U, V)                  both trained; FedMUD, FedLMT
Anchored        P(U, V~) + P(U~, V)      U, V trained, U~, V~ fixed at random; aggregation-aware, AAD
Frozen          P(U~, V)                 V trained, U~ fixed at random; +F
Hadamard        P(U1, V1) * P(U2, V2)    entry by entry; FedPara, all four trained
TensorHadamard  the same of a convolution's tensor: a core (R, R, h, w) with (R, o) and (R, i) on each side

P is a product of `products`. Anchored and Frozen are linear in what is trained, so that the mean of the factors makes
the mean of the weights.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, prod
from typing import ClassVar

import torch
from torch import Tensor

from .checks import one_of
from .matrices import Reshape, Sized, Weight, to_weight
from .products import LowRank, Product, Shape, Size

Shapes = dict[str, Shape]


class Form(ABC):
    """How one weight, or its change, is made of factors. Factors have names; `trained` and `fixed` give their
    shapes."""

    starts: ClassVar[tuple[str, ...]] = ("u",)
    """The trained factors that start at random; the others start at zero."""

    @abstractmethod
    def size(self, weight: Weight, ratio: float) -> Size:
        """The size, as a rank, with which about `ratio` times the weight's numbers are sent."""

    @abstractmethod
    def trained(self, weight: Weight, size: Size) -> Shapes:
        """The factors that are trained and sent."""

    def fixed(self, weight: Weight, size: Size) -> Shapes:
        """The factors that are drawn at random and not trained."""
        return {}

    def fans(self, factor: str, weight: Weight, size: Size) -> tuple[int, int]:
        """(fan-in, fan-out) of a factor that is drawn with a variance of 2 / fan. By default they are what torch takes
        for a parameter of the factor's shape: the axes after the second one are the receptive field."""
        shape = {**self.trained(weight, size), **self.fixed(weight, size)}[factor]
        field = prod(shape[2:])
        return shape[1] * field, shape[0] * field

    @abstractmethod
    def weight(self, weight: Weight, f: Mapping[str, Tensor]) -> Tensor:
        """The tensor in the weight's own shape, from factors by name; those of `fixed` are called "fixed.NAME"."""

    @abstractmethod
    def text(self, size: Size) -> str:
        """The size in words, for a table."""

    def sized(self, weight: Weight, ratio: float) -> Sized:
        """The weight with its size and the numbers that are sent in its place."""
        size = self.size(weight, ratio)
        return Sized(weight, size, sum(prod(shape) for shape in self.trained(weight, size).values()))


@dataclass(frozen=True)
class OfProduct(Form):
    """A form of one product of two factors, U and V."""

    product: Product = LowRank()
    reshape: Reshape = "raw"

    def __post_init__(self) -> None:
        one_of("raw", "permuted", reshape=self.reshape)

    def size(self, weight: Weight, ratio: float) -> Size:
        return self.product.size(weight, ratio, 2)

    def trained(self, weight: Weight, size: Size) -> Shapes:
        return dict(zip(("u", "v"), self.product.shapes(weight, size), strict=True))

    def of(self, u: Tensor, v: Tensor, weight: Weight) -> Tensor:
        """P(u, v) in the weight's own shape."""
        return to_weight(self.product.of(u, v, weight), weight, self.reshape)

    def text(self, size: Size) -> str:
        return self.product.text(size)


class Pair(OfProduct):
    """P(U, V), both trained; U starts at random and V at zero."""

    def weight(self, weight: Weight, f: Mapping[str, Tensor]) -> Tensor:
        return self.of(f["u"], f["v"], weight)


class BothRandom(Pair):
    """A pair of which no factor starts at zero, for a weight that is their product."""

    starts = ("u", "v")

    def fans(self, factor: str, weight: Weight, size: Size) -> tuple[int, int]:
        """The two factors are two layers. V^T is the first one, a 1 x w convolution of i channels to r, kept here as V
        of shape (i w, r); U is the second one, an h x 1 convolution of r channels to o, kept as (o h, r)."""
        (rank,) = size
        o, i, h, w = weight.shape if len(weight.shape) == 4 else (weight.rows, weight.cols, 1, 1)
        return (i * w, rank * w) if factor == "v" else (rank * h, o * h)


class Anchored(OfProduct):
    """P(U, V~) + P(U~, V); U and V are trained and start at zero, U~ and V~ are fixed at random."""

    starts = ()

    def fixed(self, weight: Weight, size: Size) -> Shapes:
        return self.trained(weight, size)

    def weight(self, weight: Weight, f: Mapping[str, Tensor]) -> Tensor:
        return self.of(f["u"], f["fixed.v"], weight) + self.of(f["fixed.u"], f["v"], weight)


class Frozen(OfProduct):
    """P(U~, V); V is trained and starts at zero, U~ is fixed at random."""

    starts = ()

    def size(self, weight: Weight, ratio: float) -> Size:
        return self.product.size(weight, ratio, 1)

    def trained(self, weight: Weight, size: Size) -> Shapes:
        return {"v": self.product.shapes(weight, size)[1]}

    def fixed(self, weight: Weight, size: Size) -> Shapes:
        return {"u": self.product.shapes(weight, size)[0]}

    def weight(self, weight: Weight, f: Mapping[str, Tensor]) -> Tensor:
        return self.of(f["fixed.u"], f["v"], weight)


class Hadamard(OfProduct):
    """P(U1, V1) * P(U2, V2), entry by entry: 2 R (m + n) numbers, R = floor(ratio m n / (2 (m + n))), at least 1."""

    starts = ("u1", "v1", "u2", "v2")

    def size(self, weight: Weight, ratio: float) -> Size:
        return (max(1, int(ratio * weight.numbers / (2 * (weight.rows + weight.cols)) + 1e-9)),)

    def trained(self, weight: Weight, size: Size) -> Shapes:
        u, v = self.product.shapes(weight, size)
        return {"u1": u, "v1": v, "u2": u, "v2": v}

    def weight(self, weight: Weight, f: Mapping[str, Tensor]) -> Tensor:
        return self.of(f["u1"], f["v1"], weight) * self.of(f["u2"], f["v2"], weight)


class TensorHadamard(Hadamard):
    """The same of a convolution's tensor, 2 (R (o + i) + R^2 h w) numbers; other weights as in `Hadamard`."""

    starts = ("u1", "v1", "u2", "v2", "core1", "core2")

    def size(self, weight: Weight, ratio: float) -> Size:
        """The larger root of R^2 h w + R (o + i) = ratio o i h w / 2, rounded up, at least 1."""
        if len(weight.shape) != 4:
            return super().size(weight, ratio)
        o, i, h, w = weight.shape
        half = (o + i) / (2 * h * w)
        return (max(1, ceil((half**2 + ratio * o * i / 2) ** 0.5 - half - 1e-9)),)

    def trained(self, weight: Weight, size: Size) -> Shapes:
        if len(weight.shape) != 4:
            return super().trained(weight, size)
        (o, i, h, w), (r,) = weight.shape, size
        side: Shapes = {}
        for k in "12":
            side |= {f"u{k}": (r, o), f"v{k}": (r, i), f"core{k}": (r, r, h, w)}
        return side

    def weight(self, weight: Weight, f: Mapping[str, Tensor]) -> Tensor:
        if len(weight.shape) != 4:
            return super().weight(weight, f)
        one, two = (_tucker(f[f"core{k}"], f[f"u{k}"], f[f"v{k}"]) for k in "12")
        return one * two


def _tucker(core: Tensor, u: Tensor, v: Tensor) -> Tensor:
    """(o, i, h, w): the sum over a, b of core[a, b] u[a, o] v[b, i]."""
    r, _, h, w = core.shape
    half = (v.mT @ core.reshape(r, r, h * w)).reshape(r, -1)  # (a, i h w)
    return (u.mT @ half).reshape(u.shape[1], v.shape[1], h, w)


def zeros_like(shape: Shape, like: Tensor) -> Tensor:
    return torch.zeros(shape, dtype=like.dtype, device=like.device)

"""Compressions: parts that take a method of local steps and make what it sends smaller.

A compression follows from the model's shapes and the run's seed, so that a method with one is `Deferred`. The
compressions `updates`, `factors` and `hadamard` are here, see `reparameterisation`; the others are in `fedhm`, `ef21_p`
and `fedbat`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

from ..contract import Algorithm, Deferred, RunContext
from ..local import LocalMethod
from ..tree import Layout
from .checks import one_of, positive, refuse
from .factors import Anchored, BothRandom, Form, Frozen, Hadamard, Pair, TensorHadamard
from .matrices import Layers, Reshape, Sized, compressible, fit
from .products import Kronecker, LowRank
from .reparameterisation import Draw, Factored, Reparameterised, refuse_states

RATIO = 1 / 32


class Compression(ABC):
    """A part that makes a smaller method of a `LocalMethod`."""

    table: ClassVar[str] = "COMPRESSIONS"
    factors: ClassVar[bool] = False
    """Whether weights are given factors, which those beside them in an adapter have already."""

    @abstractmethod
    def around(self, method: LocalMethod, layout: Layout, seed: int) -> Algorithm:
        """The compressed method. `layout`: the model's; `seed`: the run's."""


@dataclass(frozen=True)
class Compressed(Deferred):
    """A method with a compression, before the model's shapes are known."""

    method: LocalMethod
    compression: Compression

    def build(self, context: RunContext) -> Algorithm:
        if context.layout is None:
            raise ValueError("a compression needs the model's shapes, got layout=None; give RunContext a layout")
        if self.compression.factors and context.pairs:
            raise ValueError(
                f"the compression factors weights that an adapter has factored already, as {context.pairs[0].weight}; "
                "leave one of them out, or choose the compression coded"
            )
        return self.compression.around(self.method, context.layout, context.seed)


def compressed(method: LocalMethod, compression: Compression | None) -> LocalMethod | Compressed:
    """The method with a compression, or as it is where that is None."""
    return method if compression is None else Compressed(method, compression)


@dataclass(frozen=True)
class Budget:
    """How much is sent. `ratio`: numbers sent over numbers of the model; `layers`: which weights are compressed;
    `nearest`: take the smallest achievable ratio where `ratio` cannot be reached; see `matrices`."""

    ratio: float = RATIO
    layers: Layers = "inner"
    nearest: bool = False

    def fit(self, layout: Layout, form: Form) -> tuple[Sized, ...]:
        """The sizes of all compressed weights in this form."""
        return fit(layout, compressible(layout, self.layers), self.ratio, form.sized, self.nearest)


@dataclass(frozen=True)
class Factoring(Compression):
    """Factors are trained instead of weights. `based`: the factors make an update of frozen weights, which is folded in
    every `reset` rounds (0: never); else they make the weights. `draw`, `spread`: the distribution of what starts at
    random, see `Factored`."""

    form: Form
    budget: Budget = Budget()
    based: bool = True
    reset: int = 1
    draw: Draw = "uniform"
    spread: float = 0.5
    factors = True

    def __post_init__(self) -> None:
        positive(spread=self.spread)
        if self.reset < 0:
            raise ValueError(f"reset >= 0 must hold, got reset={self.reset}; 0 never resets")
        one_of("uniform", "fan_in", "fan_out", draw=self.draw)

    def around(self, method: LocalMethod, layout: Layout, seed: int) -> Algorithm:
        if self.reset:
            why = "the factors are drawn anew; give reset: 0, or another compression, as factors"
            refuse_states(method, why, server=True)
        sized = self.budget.fit(layout, self.form)
        space = Factored(layout, sized, self.form, self.draw, self.spread, seed)
        return Reparameterised(method, space, self.based, self.reset)


Change = Literal["pair", "anchored", "frozen"]
CHANGES = {"pair": Pair, "anchored": Anchored, "frozen": Frozen}
PRODUCTS = {"low_rank": LowRank(), "kronecker": Kronecker(), "kronecker_grid": Kronecker("grid")}


def updates(
    ratio: float = RATIO,
    a: float = 0.5,
    reset: int = 1,
    form: Change = "pair",
    product: Literal["low_rank", "kronecker", "kronecker_grid"] = "low_rank",
    reshape: Reshape = "raw",
    layers: Layers = "inner",
    nearest: bool = False,
) -> Factoring:
    """frozen weights and a factored change of them, as in FedMUD"""
    one_of(*CHANGES, form=form)
    one_of(*PRODUCTS, product=product)
    positive(a=a)
    return Factoring(CHANGES[form](PRODUCTS[product], reshape), Budget(ratio, layers, nearest), True, reset, spread=a)


def factors(
    ratio: float = RATIO,
    a: float | None = None,
    draw: Draw = "uniform",
    reshape: Reshape = "permuted",
    layers: Layers = "inner",
    nearest: bool = False,
) -> Factoring:
    """weights that are products of two factors, as in FedLMT"""
    spread = _spread(a, draw, 0.5)
    return Factoring(BothRandom(LowRank(), reshape), Budget(ratio, layers, nearest), False, 0, draw, spread)


def _spread(a: float | None, draw: Draw, default: float) -> float:
    """a of U(-a, a); refused where factors are drawn from another distribution."""
    if draw != "uniform":
        refuse({"a": a}, f"draw={draw} is normal, with a variance of its own", "leave it out, or choose draw: uniform")
    a = default if a is None else a
    positive(a=a)
    return a


def hadamard(
    ratio: float = RATIO,
    a: float | None = None,
    draw: Draw = "uniform",
    form: Literal["tensor", "matrix"] = "tensor",
    layers: Layers = "inner",
    nearest: bool = False,
) -> Factoring:
    """weights that are entrywise products of two low-rank ones, as in FedPara"""
    one_of("tensor", "matrix", form=form)
    made = TensorHadamard() if form == "tensor" else Hadamard(LowRank(), "permuted")
    return Factoring(made, Budget(ratio, layers, nearest), False, 0, draw, _spread(a, draw, 1.0))

"""Named tensors on one flat vector.

A `Tree` holds all tensors of a model, or anything shaped like it (a gradient, a momentum, a control variate). One
vector backs them all, so that a line such as `g - c_i + c` costs three kernels, not three per layer; `tree[name]` is a
view of the layer's shape. Trees are immutable values: every operation returns a new one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .parts.groups import Number, PerGroup, both, dual_places, sides


@dataclass(frozen=True)
class Layout:
    """Names and shapes of the leaves, in the order in which they lie on the flat vector."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @cached_property
    def sizes(self) -> list[int]:
        """The number of entries of each leaf."""
        return [math.prod(shape) for shape in self.shapes]

    @cached_property
    def spans(self) -> dict[str, tuple[int, int, tuple[int, ...]]]:
        """name -> (start on the flat vector, length, shape)."""
        spans, start = {}, 0
        for name, size, shape in zip(self.names, self.sizes, self.shapes, strict=True):
            spans[name] = (start, size, shape)
            start += size
        return spans

    @cached_property
    def sides(self) -> tuple[bool, ...]:
        """The groups of parameters that the leaves belong to, see `groups.sides`."""
        return sides(self.names)

    def pick(self, names: Iterable[str]) -> Layout:
        """The layout of some of the leaves, in this layout's order."""
        wanted = set(names)
        kept = [(n, s) for n, s in zip(self.names, self.shapes, strict=True) if n in wanted]
        return Layout(tuple(n for n, _ in kept), tuple(s for _, s in kept))


class Tree:
    """Named tensors on one vector. `flat`: (P,), all leaves end to end; `layout`: their names and shapes."""

    __slots__ = ("flat", "layout")

    flat: Tensor
    layout: Layout

    def __init__(self, flat: Tensor, layout: Layout) -> None:
        self.flat, self.layout = flat, layout

    @staticmethod
    def of(leaves: Mapping[str, Tensor]) -> Tree:
        """The tree of named tensors, which must have one dtype."""
        layout = Layout(tuple(leaves), tuple(tuple(t.shape) for t in leaves.values()))
        return Tree.join(layout, leaves)

    @staticmethod
    def join(layout: Layout, leaves: Mapping[str, Tensor]) -> Tree:
        """The tree with this layout; `leaves`: has a tensor for each of its names."""
        if not layout.names:
            raise ValueError("a tree needs at least one tensor, got none")
        return Tree(torch.cat([leaves[name].reshape(-1) for name in layout.names]), layout)

    # --- leaves -------------------------------------------------------------------------------------------------
    def __getitem__(self, name: str) -> Tensor:
        start, size, shape = self.layout.spans[name]
        return self.flat[start : start + size].view(shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self.layout.names)

    def views(self) -> list[Tensor]:
        """All leaves as views, in the layout's order."""
        parts = self.flat.split(self.layout.sizes)
        return [part.view(shape) for part, shape in zip(parts, self.layout.shapes, strict=True)]

    def items(self) -> Iterator[tuple[str, Tensor]]:
        return zip(self.layout.names, self.views(), strict=True)

    def map(self, f: Callable[[str, Tensor], Tensor]) -> Tree:
        """The tree of f(name, leaf) of every leaf; f must keep the shape."""
        return Tree.join(self.layout, {name: f(name, leaf) for name, leaf in self.items()})

    def pick(self, names: Iterable[str]) -> Tree:
        """The tree of some of the leaves."""
        layout = self.layout.pick(names)
        return self if layout == self.layout else Tree.join(layout, {name: self[name] for name in layout.names})

    # --- algebra ------------------------------------------------------------------------------------------------
    def _with(self, flat: Tensor) -> Tree:
        return Tree(flat, self.layout)

    def __add__(self, other: Tree) -> Tree:
        return self._with(self.flat + other.flat)

    def __sub__(self, other: Tree) -> Tree:
        return self._with(self.flat - other.flat)

    def __neg__(self) -> Tree:
        return self._with(-self.flat)

    def __mul__(self, factor: Number | Tensor | Tree) -> Tree:
        return self._with(self.flat * self._factor(factor))

    __rmul__ = __mul__

    def __truediv__(self, divisor: Number | Tensor | Tree) -> Tree:
        return self._with(self.flat / self._factor(divisor))

    def _factor(self, factor: Number | Tensor | Tree) -> float | Tensor:
        """What to multiply the flat vector by. A number for each group becomes a vector (P,) where there are two
        groups."""
        if isinstance(factor, Tree):
            return factor.flat
        if not isinstance(factor, PerGroup):
            return factor
        primal, dual = both(factor)
        if self.layout.sides == (False, True) and any(isinstance(number, Tensor) for number in (primal, dual)):
            return self._spread(*(torch.as_tensor(number, dtype=self.flat.dtype) for number in (primal, dual)))
        if self.layout.sides == (False, True) and primal != dual:
            return self._spread(*(self.flat.new_full((), number) for number in (primal, dual)))
        return both(factor)[self.layout.sides[0]]

    def _spread(self, primal: Tensor, dual: Tensor) -> Tensor:
        """(P,): the number of its group at each place; `primal`, `dual`: ()."""
        return torch.where(self._dual(), dual, primal)

    def _dual(self) -> Tensor:
        return dual_places(self.layout.names, tuple(self.layout.sizes), self.flat.device)

    def add(self, other: Tree, scale: Number) -> Tree:
        """self + scale * other, in one kernel."""
        return self._with(plus(self.flat, other.flat, self._factor(scale)))

    def lerp(self, other: Tree, weight: Number) -> Tree:
        """(1 - weight) * self + weight * other."""
        factor = self._factor(weight)
        if isinstance(factor, Tensor):
            factor = factor.to(self.flat.dtype)
        return self._with(self.flat.lerp(other.flat, factor))

    def sqrt(self) -> Tree:
        return self._with(self.flat.sqrt())

    def sign(self) -> Tree:
        return self._with(self.flat.sign())

    def zeros(self) -> Tree:
        return self._with(torch.zeros_like(self.flat))

    def dot(self, other: Tree) -> Tensor:
        """Inner product, ()."""
        return torch.dot(self.flat, other.flat)

    def norm2(self) -> Tensor:
        """Squared Euclidean norm of all leaves as one vector, ()."""
        return torch.dot(self.flat, self.flat)

    def norm(self) -> Tensor:
        return self.norm2().sqrt()

    def norms(self) -> Tensor:
        """(): the norm. Where there are two groups, (P,): the norm of its group at each place."""
        if self.layout.sides != (False, True):
            return self.norm()
        zero = self.flat.new_zeros(())
        primal, dual = (self._with(torch.where(self._dual(), *pair)) for pair in ((zero, self.flat), (self.flat, zero)))
        return self._spread(primal.norm(), dual.norm())

    def to(self, target: torch.dtype | torch.device) -> Tree:
        return self._with(self.flat.to(target))

    def __repr__(self) -> str:
        leaves = ", ".join(f"{n}{list(s)}" for n, s in zip(self.layout.names, self.layout.shapes, strict=True))
        return f"Tree({leaves})"


def plus(x: Tensor, y: Tensor, scale: float | Tensor) -> Tensor:
    """x + scale * y in one kernel, with the same rounding whether `scale` is a number or a tensor."""
    if isinstance(scale, Tensor):
        return torch.addcmul(x, scale.to(x.dtype), y)
    return x.add(y, alpha=scale)


pytree.register_pytree_node(
    Tree,
    lambda tree: ([tree.flat], tree.layout),
    lambda leaves, layout: Tree(next(iter(leaves)), layout),
    serialized_type_name="fedfleet.Tree",
)

"""Rules: steps of the local optimiser, elementwise or by a norm of the whole vector. Muon's are in `muon`.

A rule gets a direction v, a gradient or an estimate of one, and returns the next iterate. The conventions of momentum:
`Momentum` is torch's (u <- mu u + v, dampening 0); `Averaged` interpolates (m <- mu m + (1 - mu) v). A step size may be
one for each group of parameters, see `groups`; norms are then those of each group.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..local import Rule
from ..tree import Layout, Tree
from .checks import fraction, nonnegative, one_of, positive, refuse
from .groups import Number, PerGroup
from .numbers import beside, nonzero, quotient

DecayOn = Literal["all", "matrices"]
"""The tensors that decay."""


@dataclass(frozen=True)
class Sgd(Rule):
    """y <- y - lr v."""

    lr: Number = 0.1

    def __post_init__(self) -> None:
        positive(lr=self.lr)

    def step(self, y: Tree, v: Tree, state: Any) -> tuple[Tree, Any]:
        return y.add(v, -self.lr), state

    def plain_lr(self) -> float | None:
        return None if isinstance(self.lr, PerGroup) else self.lr


@dataclass(frozen=True)
class Momentum(Rule):
    """u <- mu u + v;  y <- y - lr u, or y <- y - lr (v + mu u) with Nesterov. State: u, shaped like x."""

    lr: Number = 0.1
    mu: float = 0.9
    nesterov: bool = False

    def __post_init__(self) -> None:
        positive(lr=self.lr)
        fraction(mu=self.mu)

    def init(self, x: Tree) -> Tree:
        return x.zeros()

    def step(self, y: Tree, v: Tree, state: Tree) -> tuple[Tree, Tree]:
        u = v.add(state, self.mu)
        return y.add(v.add(u, self.mu) if self.nesterov else u, -self.lr), u


class Moments(NamedTuple):
    first: Tree  # average of v
    second: Tree  # average of v^2
    count: Tensor  # (), steps taken


@lru_cache(maxsize=8)
def decayed_places(layout: Layout, no_decay: tuple[str, ...], device: torch.device) -> Tensor:
    """(P,) bool: the numbers of tensors with two axes or more whose names match no pattern of `no_decay`."""
    each = zip(layout.names, layout.shapes, layout.sizes, strict=True)
    decays = [(len(shape) >= 2 and not any(fnmatchcase(name, p) for p in no_decay), n) for name, shape, n in each]
    return torch.cat([torch.full((n,), decay, device=device) for decay, n in decays])


@dataclass(frozen=True)
class Adam(Rule):
    """Adam with bias correction, the counter starting at 1; `weight_decay` is decoupled (AdamW).

    `decay_on`: all tensors decay, or those with two axes or more (matrices), embeddings included, as language models
    are trained; `no_decay`: with matrices, patterns, * and ? as in file names, of tensors that do not decay.
    """

    lr: Number = 0.001
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    decay_on: DecayOn = "all"
    no_decay: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        positive(lr=self.lr, eps=self.eps)
        nonnegative(weight_decay=self.weight_decay)
        fraction(beta1=self.betas[0], beta2=self.betas[1])
        one_of("all", "matrices", decay_on=self.decay_on)
        if self.decay_on == "all":
            refuse({"no_decay": self.no_decay or None}, "all tensors decay", "leave it out, or give decay_on: matrices")

    def init(self, x: Tree) -> Moments:
        return Moments(x.zeros(), x.zeros(), x.flat.new_zeros(()))

    def step(self, y: Tree, v: Tree, state: Moments) -> tuple[Tree, Moments]:
        b1, b2 = self.betas
        count = state.count + 1
        first, second = state.first.lerp(v, 1 - b1), state.second.lerp(v * v, 1 - b2)
        scale = second.flat.sqrt() / (1 - beside(count, b2) ** count).sqrt() + self.eps
        move = first.flat / (1 - beside(count, b1) ** count) / scale
        y = self._decayed(y) if nonzero(self.weight_decay) else y
        return y.add(Tree(move, y.layout), -self.lr), Moments(first, second, count)

    def _decayed(self, y: Tree) -> Tree:
        decayed = y * (1 - self.lr * self.weight_decay)
        if self.decay_on == "all":
            return decayed
        places = decayed_places(y.layout, self.no_decay, y.flat.device)
        return Tree(torch.where(places, decayed.flat, y.flat), y.layout)


@dataclass(frozen=True)
class Normalised(Rule):
    """y <- y - lr v / |v|, with the norm over all parameters of a group as one vector; v = 0 does not move. over =
    "tensor": each tensor by its own norm, so that a lone number takes a step of its sign."""

    lr: Number = 0.01
    eps: float = 1e-12
    over: Literal["group", "tensor"] = "group"

    def __post_init__(self) -> None:
        positive(lr=self.lr, eps=self.eps)
        one_of("group", "tensor", over=self.over)

    def step(self, y: Tree, v: Tree, state: Any) -> tuple[Tree, Any]:
        if self.over == "tensor":
            unit = v.map(lambda name, leaf: leaf / torch.linalg.vector_norm(leaf).clamp(min=self.eps))
        else:
            unit = v / v.norms().clamp(min=self.eps)
        return y.add(unit, -self.lr), state


@dataclass(frozen=True)
class Clip(Rule):
    """The wrapped rule on min(1, radius / |v|) v, with the norm over all parameters of a group as one vector."""

    rule: Rule = Sgd()
    radius: float = 1.0

    def __post_init__(self) -> None:
        positive(radius=self.radius)

    @property
    def patterns(self) -> dict[str, tuple[str, ...]]:
        return {f"rule.{key}": each for key, each in self.rule.patterns.items()}

    def init(self, x: Tree) -> Any:
        return self.rule.init(x)

    def step(self, y: Tree, v: Tree, state: Any) -> tuple[Tree, Any]:
        norms = v.norms().clamp(min=torch.finfo(v.flat.dtype).tiny)
        return self.rule.step(y, v * quotient(self.radius, norms).clamp(max=1.0), state)


class Average(NamedTuple):
    mean: Tree  # m
    rule: Any  # the wrapped rule's state


@dataclass(frozen=True)
class Averaged(Rule):
    """The wrapped rule on m <- mu m + (1 - mu) v; with Nesterov on (1 - mu) v + mu m. State: m and the rule's.

    The order of operations is that of `torch.optim.Muon` (torch 2.13), so that the bits agree.
    """

    rule: Rule
    mu: float = 0.95
    nesterov: bool = True

    def __post_init__(self) -> None:
        fraction(mu=self.mu)

    @property
    def patterns(self) -> Mapping[str, tuple[str, ...]]:
        return self.rule.patterns  # `muon` has the options of both rules in one mapping, so that no key needs a prefix

    def init(self, x: Tree) -> Average:
        return Average(x.zeros(), self.rule.init(x))

    def step(self, y: Tree, v: Tree, state: Average) -> tuple[Tree, Average]:
        mean = state.mean.lerp(v, 1 - self.mu)
        y, inner = self.rule.step(y, v.lerp(mean, self.mu) if self.nesterov else mean, state.rule)
        return y, Average(mean, inner)


def adamw(
    lr: Number = 0.001,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    decay_on: DecayOn = "all",
    no_decay: tuple[str, ...] = (),
) -> Adam:
    """Adam with decoupled weight decay, 0.01 unless given. decay_on: all tensors decay, or those with two axes or more
    (matrices); no_decay: with matrices, patterns, * and ? as in file names, of tensors that do not decay."""
    return Adam(lr, betas, eps, weight_decay, decay_on, no_decay)

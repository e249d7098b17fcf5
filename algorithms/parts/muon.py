"""Steps along -lmo of a norm's unit ball (linear minimisation oracle), and Muon, such a step on an averaged gradient.

    lmo(v) = argmin over |d| <= 1 of <v, d>
    spectral    per matrix, U V^T of v = U S V^T, scaled per layer; vectors and scalars take a rule of their own
    euclidean   v / |v|, all parameters as one vector
    max         sign(v)

Jordan et al. 2024; Liu et al. 2025, arXiv:2502.16982 (the layer scale `moonlight`); Takezawa et al. 2025.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache, lru_cache
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from ..local import Rule, defines_both
from ..tree import Layout, Tree, plus
from .checks import nonnegative, one_of, positive, refuse
from .groups import Number, PerGroup, at
from .numbers import nonzero
from .orthogonal import FASTER, SCHEMES, How, Part, newton_schulz, schatten, svd
from .renamed import renamed
from .rules import Averaged, Normalised, Sgd


def as_matrix(shape: tuple[int, ...]) -> tuple[int, int] | None:
    """(rows, cols) of a tensor that counts as a matrix, None for any other. Tensors of two or more axes are matrices, a
    convolution kernel (out, in, h, w) as out x (in h w); biases, gains and scalars are not. All methods use this
    rule."""
    return (shape[0], torch.Size(shape[1:]).numel()) if len(shape) >= 2 else None


@cache
def kinds(layout: Layout, aux: tuple[str, ...] = ()) -> dict[str, tuple[int, int] | None]:
    """name -> (rows, cols) for matrices, None for the rest and for names that match one of `aux`."""
    shapes = zip(layout.names, layout.shapes, strict=True)
    return {n: None if any(fnmatchcase(n, pattern) for pattern in aux) else as_matrix(shape) for n, shape in shapes}


class Parts(NamedTuple):
    """The tensors of a layout as Muon sees them. matrices: (rows, cols) -> names. vectors: the names of the rest, which
    has the layout `rest`."""

    matrices: dict[tuple[int, int], list[str]]
    vectors: list[str]
    rest: Layout


@cache
def parts(layout: Layout, aux: tuple[str, ...]) -> Parts:
    """The tensors of a layout by their kind, as `kinds` has them."""
    matrices, vectors = {}, []
    for name, kind in kinds(layout, aux).items():
        matrices.setdefault(kind, []).append(name) if kind else vectors.append(name)
    return Parts(matrices, vectors, layout.pick(vectors))


SCALES = {
    "none": lambda a, b: 1.0,
    "jordan": lambda a, b: max(1.0, a / b) ** 0.5,
    "moonlight": lambda a, b: 0.2 * max(a, b) ** 0.5,
    "spectral": lambda a, b: (a / b) ** 0.5,
}
"""name -> factor on the step of an a x b matrix; a convolution counts as its flattened matrix."""


NormOrder = Annotated[float, "may be infinite"]


class Ball(ABC):
    """The step that a matrix gives, which is an orthogonal one for the ball of the spectral norm."""

    table: ClassVar[str] = "BALLS"

    @abstractmethod
    def orthogonal(self, m: Tensor) -> Tensor:
        """-lmo on the last two axes of m (..., rows, cols)."""


@dataclass(frozen=True)
class NewtonSchulz(Ball):
    """Newton-Schulz iterations: `iterations`, 0 to 10, with the coefficients of `scheme`, computed in `dtype`, the same
    as the parameters' or bfloat16. Compiled kernels have rounding errors of about that size or smaller ones."""

    iterations: int = 5
    scheme: str = "classic"
    dtype: Literal["same", "bfloat16"] = "same"

    def __post_init__(self) -> None:
        one_of(*SCHEMES, scheme=self.scheme)
        if not 0 <= self.iterations <= 10:
            raise ValueError(f"0 <= iterations <= 10 must hold, got iterations={self.iterations}")
        one_of("same", "bfloat16", dtype=self.dtype)

    def orthogonal(self, m: Tensor) -> Tensor:
        return newton_schulz(m, *self.how)

    @property
    def how(self) -> How:
        return self.scheme, self.iterations, torch.bfloat16 if self.dtype == "bfloat16" else None


UNNAMED = NewtonSchulz(scheme="jordan")
"""The coefficients of every method whose paper runs Newton-Schulz iterations without naming them: Jordan's, with which
Muon was published."""


@dataclass(frozen=True)
class Svd(Ball):
    """Exact, by a singular value decomposition; slow."""

    def orthogonal(self, m: Tensor) -> Tensor:
        return svd(m)


@dataclass(frozen=True)
class Schatten(Ball):
    """Exact steps for the ball of Schatten's norm of order p, the p-norm of the singular values, from 1 to infinity:
    U diag(s^(q - 1)) V^T / |s|_q^(q - 1) for M = U diag(s) V^T and 1 / p + 1 / q = 1. Order 1 is the trace norm, whose
    steps have rank one, 2 is Frobenius' norm, and at infinity the steps are those of `Svd`; slow."""

    order: NormOrder = 2.0

    def __post_init__(self) -> None:
        if not self.order >= 1:
            raise ValueError(f"order >= 1 must hold, got order={self.order}")

    def orthogonal(self, m: Tensor) -> Tensor:
        return schatten(m, float(self.order))


@dataclass(frozen=True)
class Identity(Ball):
    """No orthogonalisation: the matrix itself. With scale "none" the step is SGD's."""

    def orthogonal(self, m: Tensor) -> Tensor:
        return m


@dataclass(frozen=True)
class Spectral(Rule):
    """W <- W (1 - lr weight_decay) - lr scale orthogonal(v) for matrices; `vector_rule` for everything else, and for
    matrices whose names match one of `aux` (* and ? as in file names), such as a first layer, embeddings or an output
    head."""

    lr: Number = 0.001
    vector_rule: Rule = field(default_factory=Sgd)
    ball: Ball = field(default_factory=NewtonSchulz)
    scale: str = "moonlight"
    weight_decay: float = 0.0
    aux: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        positive(lr=self.lr)
        nonnegative(weight_decay=self.weight_decay)
        one_of(*SCALES, scale=self.scale)

    @property
    def patterns(self) -> dict[str, tuple[str, ...]]:
        return {"aux": self.aux}

    def init(self, x: Tree) -> Any:
        vectors = parts(x.layout, self.aux).vectors
        return self.vector_rule.init(x.pick(vectors)) if vectors else ()

    def step(self, y: Tree, v: Tree, state: Any) -> tuple[Tree, Any]:
        if (found := self._by_faster_kernel(y, v)) is not None:
            return found, state
        own, pieces = parts(y.layout, self.aux), {}
        ys, vs = (dict(zip(y.layout.names, tree.flat.split(y.layout.sizes), strict=True)) for tree in (y, v))
        for shape, names in own.matrices.items():
            if len(names) == 1:
                moves = self.ball.orthogonal(vs[names[0]].reshape(shape))[None]
            else:
                moves = self.ball.orthogonal(torch.stack([vs[name].reshape(shape) for name in names]))
            for name, move in zip(names, moves, strict=True):
                lr, w = at(self.lr, name), ys[name]
                w = w * (1 - lr * self.weight_decay) if nonzero(self.weight_decay) else w
                pieces[name] = plus(w, move.reshape(-1), -lr * SCALES[self.scale](*shape))
        if own.vectors:
            some_y, some_v = (Tree(torch.cat([each[name] for name in own.vectors]), own.rest) for each in (ys, vs))
            rest, state = self.vector_rule.step(some_y, some_v, state)
            pieces.update(zip(own.vectors, rest.flat.split(own.rest.sizes), strict=True))
        return Tree(torch.cat([pieces[name] for name in y.layout.names]), y.layout), state

    def _by_faster_kernel(self, y: Tree, v: Tree) -> Tree | None:
        """The step by one call of a faster kernel, or None. Matrices must have Newton-Schulz iterations, and the rule
        for the rest must be plain descent."""
        faster, ball, rest = FASTER.get(), self.ball, self.vector_rule
        if faster is None or type(ball) is not NewtonSchulz or not defines_both(type(rest), "step", "plain_lr"):
            return None
        lr, decay, vector_lr = self.lr, self.weight_decay, rest.plain_lr()
        if not isinstance(lr, int | float | PerGroup) or not isinstance(decay, int | float):
            return None
        if not isinstance(vector_lr, int | float):
            return None
        flat = faster(v.flat, y.flat, places(y.layout, self.aux, self.scale, lr, decay, vector_lr), ball.how)
        return None if flat is None else Tree(flat, y.layout)


@lru_cache
def places(
    layout: Layout, aux: tuple[str, ...], scale: str, lr: Number, weight_decay: float, vector_lr: float
) -> tuple[Part, ...]:
    """All tensors of a layout and what becomes of them in a step of `Spectral`."""
    found = []
    for name, matrix in kinds(layout, aux).items():
        start, size, _ = layout.spans[name]
        if size == 0:
            continue
        if matrix is None:
            found.append(Part(start, 0, size, 1.0, -vector_lr))
        else:
            own = at(lr, name)
            found.append(Part(start, *matrix, 1 - own * weight_decay, -own * SCALES[scale](*matrix)))
    return tuple(found)


@dataclass(frozen=True)
class Sign(Rule):
    """y <- y - lr sign(v), which is -lmo of the max norm's ball."""

    lr: Number = 0.001

    def __post_init__(self) -> None:
        positive(lr=self.lr)

    def step(self, y: Tree, v: Tree, state: Any) -> tuple[Tree, Any]:
        return y.add(v.sign(), -self.lr), state


@renamed(matrices="matrix_lr", vectors="vector_lr")
def lmo(
    norm: Literal["spectral", "euclidean", "max"] = "spectral",
    matrix_lr: Number = 0.001,
    vector_lr: Number | Rule | None = None,
    ball: Ball | None = None,
    scale: str | None = None,
    aux: tuple[str, ...] = (),
) -> Rule:
    """A step of length `matrix_lr` along -lmo of a norm's ball.

    norm: spectral, euclidean or max; the latter two treat all parameters as one vector and use `matrix_lr` alone, and
    the other arguments are refused. vector_lr: SGD step size of what is not a matrix, 0.1 unless given, or a rule for
    it. ball: how matrices are orthogonalised, by default five classic Newton-Schulz iterations. scale: none, jordan,
    moonlight or spectral, moonlight unless given. aux: names of matrices that `vector_lr` is for too.
    """
    positive(matrix_lr=matrix_lr)
    one_of("spectral", "euclidean", "max", norm=norm)
    if norm == "spectral":
        rest = _on_vectors(0.1 if vector_lr is None else vector_lr)
        return Spectral(matrix_lr, rest, ball or NewtonSchulz(), "moonlight" if scale is None else scale, aux=aux)
    given = {"vector_lr": vector_lr, "ball": ball, "scale": scale, "aux": aux or None}
    refuse(given, f"norm={norm} has one rule for all parameters", "leave it out, or choose norm: spectral")
    return Normalised(matrix_lr) if norm == "euclidean" else Sign(matrix_lr)


def _on_vectors(vector_lr: Number | Rule) -> Rule:
    """The rule for what is not a matrix, from an SGD step size or a rule."""
    if isinstance(vector_lr, Rule):
        return vector_lr
    positive(vector_lr=vector_lr)
    return Sgd(vector_lr)


@renamed(vectors="vector_lr")
def muon(
    lr: Number = 0.02,
    vector_lr: Number | Rule = 0.1,
    mu: float = 0.95,
    nesterov: bool = True,
    ball: Ball | None = None,
    scale: str = "jordan",
    weight_decay: float = 0.0,
    aux: tuple[str, ...] = (),
) -> Rule:
    """Muon: orthogonalised momentum on matrices; `vector_lr`, an SGD step size or a rule, on the same momentum for
    everything else. The defaults are Jordan's, but the arithmetic stays in the parameters' dtype; with ball = {name:
    newton_schulz, scheme: jordan, dtype: bfloat16}, and with torch's kernels, the bits are those of
    `torch.optim.Muon`."""
    step = Spectral(lr, _on_vectors(vector_lr), ball or NewtonSchulz(scheme="jordan"), scale, weight_decay, aux)
    return Averaged(step, mu, nesterov)

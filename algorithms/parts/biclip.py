"""BiClip: a step along the gradient with its magnitudes kept between two thresholds.

Lee, Zaheer, Li, ICML 2025 ("Efficient distributed optimization under heavy-tailed noise", TailOPT), arXiv:2502.04164.

    coordinate   BiClip(z)_j = sign(z_j) min(u, max(d, |z_j|))           sign(0) = 0
    norm         BiClip(z)   = z min(u, max(d, |z|)) / |z|               |z| over the whole model; 0 stays 0
    y <- (1 - lr weight_decay) (y - lr BiClip(v; d, u))

d = 0 and u = .inf is plain SGD; d = u is u sign(z), or u z / |z|; d = 0 in norm mode is gradient clipping. The paper
tunes the thresholds by task. Its schedules over the rounds t = 1, 2, …, which are lr t^power and likewise for d and u,
have powers of 0 by default (here u: {schedule: polynomial, start: 0.1, power: 0.25}). d = 0, u = 0.1 and mode =
"coordinate" are ours: the mode that others ran in comparisons is not known. The decay comes after the step, as in the
paper's algorithm; there are no departures from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from ..local import Rule
from ..tree import Tree
from .checks import nonnegative, one_of, positive
from .numbers import nonzero

Mode = Literal["coordinate", "norm"]
Threshold = Annotated[float, "may be infinite"]
"""A setting that may be .inf; the configuration refuses infinite numbers everywhere else."""


def biclip(z: Tree, d: Any, u: Any, mode: Mode) -> Tree:
    """z with its magnitudes, or its norm, kept between d and u."""
    if isinstance(d, Tensor) or isinstance(u, Tensor):  # thresholds of several runs; `clamp` takes no mixture
        d, u = (torch.as_tensor(number, dtype=z.flat.dtype) for number in (d, u))
    if mode == "coordinate":
        return z.sign() * Tree(z.flat.abs().clamp(d, u), z.layout)
    size = z.norm()
    return z * torch.where(size > 0, size.clamp(d, u) / size, 0.0)


def check_thresholds(d: float, u: float, mode: Mode, where: str = "") -> None:
    """Check 0 <= d <= u; `where`: prefix of the settings' names in messages."""
    nonnegative(**{f"{where}d": d})
    positive(**{f"{where}u": u})
    if not d <= u:
        raise ValueError(f"{where}d <= {where}u must hold, got {where}d={d}, {where}u={u}; raise {where}u")
    one_of("coordinate", "norm", **{f"{where}mode": mode})


@dataclass(frozen=True)
class BiClip(Rule):
    """`d`, `u`: lower and upper threshold; `mode`: coordinate by coordinate, or the norm of the whole vector."""

    lr: float = 0.1
    d: float = 0.0
    u: Threshold = 0.1
    mode: Mode = "coordinate"
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        positive(lr=self.lr)
        nonnegative(weight_decay=self.weight_decay)
        check_thresholds(self.d, self.u, self.mode)

    def step(self, y: Tree, v: Tree, state: Any) -> tuple[Tree, Any]:
        y = y.add(biclip(v, self.d, self.u, self.mode), -self.lr)
        return y * (1 - self.lr * self.weight_decay) if nonzero(self.weight_decay) else y, state

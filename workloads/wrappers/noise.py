"""Distributions of gradient noise. All draws follow from keys: they are the same for a client alone, in a block, and
when a method asks an oracle twice.

    gaussian    standard normal
    student_t   `tail` degrees of freedom: moments below `tail` are finite
    stable      symmetric alpha-stable, alpha = `tail` in (0, 2]: characteristic function exp(-|t|^alpha); 2 is N(0, 2)
    pareto      a random sign times (U^(-1 / tail) - 1) with U uniform, Lomax: P(|x| > z) = (1 + z)^(-tail)

Student's t uses the polar formula of Bailey 1994, the stable law that of Chambers, Mallows and Stuck 1976. Both are
elementwise and reject nothing, so every draw costs the same two uniform numbers.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from .. import counted

Law = Literal["gaussian", "student_t", "stable", "pareto"]


def check(law: str, tail: float) -> None:
    """Raise ValueError if there is no law of this name, or if it does not allow this tail."""
    if law not in get_args(Law):
        raise ValueError(f"law must be one of {', '.join(get_args(Law))}, got law={law!r}")
    if not 0 < tail < math.inf or (law == "stable" and tail > 2):
        most = "tail <= 2" if law == "stable" else "tail < infinity"
        raise ValueError(f"0 < {most} must hold for law={law}, got tail={tail}")


def draw(law: Law, tail: float, key: Tensor, count: int) -> Tensor:
    """(..., count) float64 from keys (...): independent draws."""
    if law == "gaussian":
        return counted.normal(key, count)
    u = 1 - counted.uniform(counted.key(key, "magnitude"), count)  # in (0, 1]
    v = counted.uniform(counted.key(key, "angle"), count)
    if law == "pareto":
        return torch.where(v < 0.5, -1.0, 1.0) * torch.expm1(-u.log() / tail)
    if law == "student_t":
        return (tail * torch.expm1(-2 / tail * u.log())).sqrt() * (2 * math.pi * v).cos()
    return _stable(tail, u, math.pi * (v - 0.5))


def _stable(alpha: float, u: Tensor, angle: Tensor) -> Tensor:
    """Symmetric stable draws from u, uniform in (0, 1], and angle, uniform in [-pi / 2, pi / 2)."""
    if alpha == 1:
        return angle.tan()
    waiting = (-u.log()).clamp(min=1e-300)  # exponentially distributed
    first = (alpha * angle).sin() / angle.cos().clamp(min=1e-300) ** (1 / alpha)
    return first * (((1 - alpha) * angle).cos() / waiting) ** ((1 - alpha) / alpha)

"""Arithmetic with a method's numbers: each is a number of Python or, where several runs that differ in it are trained
together, a tensor () of float64 under `torch.func.vmap`.

Torch gives a product of such a tensor and a vector the bits that the number of Python would give. It computes with the
tensor and a scalar, such as a norm, in float64, and with a number of Python and a scalar in the scalar's type.
"""

from __future__ import annotations

from torch import Tensor


def nonzero(number: float | Tensor) -> bool:
    """Whether a number is another one than 0. A tensor counts as such, because its values must not decide what is
    computed."""
    return isinstance(number, Tensor) or number != 0


def beside(scalar: Tensor, number: float | Tensor) -> float | Tensor:
    """The number, for arithmetic with a scalar, ()."""
    return number.to(scalar.dtype) if isinstance(number, Tensor) else number


def quotient(number: float | Tensor, scalar: Tensor) -> Tensor:
    """number / scalar, (), as torch divides a number of Python by a tensor."""
    return scalar.reciprocal() * beside(scalar, number)

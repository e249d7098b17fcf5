"""Norm clipping: the mean of the messages, each of them shortened to a norm of at most c.

    (1/S) sum of x_i min(1, c / |x_i|)

With a given c the workers shorten the messages before they add them up, and nothing is stored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from .contract import Aggregator
from .messages import Answer, Messages, shortening


@dataclass(frozen=True, kw_only=True)
class NormClipping(Aggregator):
    """c: the largest norm, or c_relative: the same in units of the median norm of the round's messages (default 1)."""

    c: float | None = None
    c_relative: float | None = None

    called: ClassVar[str] = "norm clipping"

    def __post_init__(self) -> None:
        check_bound(self.c, self.c_relative)

    @property
    def adds(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.c is not None

    def aggregate(self, x: Messages) -> Answer:
        return x.average(factors=factors(x.norms, self.c, self.c_relative))

    def contribution(self, x: Tensor, y: Tensor) -> Tensor:
        assert self.c is not None
        norm = torch.linalg.vector_norm(x, dtype=torch.float64)
        factor = torch.where(norm > self.c, self.c / norm, 1.0)
        return torch.where(torch.isfinite(norm), y * factor.to(y.dtype), 0.0)


def check_bound(c: float | None, c_relative: float | None) -> None:
    """Raise ValueError unless one bound at most is given, above 0."""
    if c is not None and c_relative is not None:
        raise ValueError(f"give c or c_relative, got c={c}, c_relative={c_relative}")
    given = c if c is not None else c_relative
    if given is not None and not given > 0:
        raise ValueError(f"c > 0 must hold, got {given}; give a bound on the norm of a message")


def factors(norms: np.ndarray, c: float | None, c_relative: float | None) -> np.ndarray:
    """(S,) min(1, c / |x_i|)."""
    return shortening(norms, (c_relative or 1.0) * float(np.median(norms)) if c is None else c)

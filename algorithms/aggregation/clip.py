"""Clipping before a rule: every message is shortened to a norm of at most c."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .contract import Before
from .messages import Messages
from .norm_clipping import check_bound, factors


@dataclass(frozen=True, kw_only=True)
class ClipRows(Before):
    """c: the largest norm, or c_relative: the same in units of the median norm (default 1)."""

    c: float | None = None
    c_relative: float | None = None

    called: ClassVar[str] = "clipping"

    def __post_init__(self) -> None:
        check_bound(self.c, self.c_relative)

    def apply(self, x: Messages) -> Messages:
        return x.scale(factors(x.norms, self.c, self.c_relative))

"""Visits in two parts: first one side of the local state moves, then the other."""

from __future__ import annotations

from itertools import count
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


class Turns(NamedTuple):
    """A visit in two parts: steps of the personal tensors and steps of the shared ones, as `personal` to `shared`.
    first: who begins."""

    personal: int
    shared: int
    first: Literal["personal", "shared"] = "personal"

    def is_personal(self, done: Any) -> Any:
        """Whether a step moves the personal tensors. done: the fraction of the visit's steps that are finished. Both
        sides are correctly rounded quotients of whole numbers, so that equality is exact."""
        whole = self.personal + self.shared
        return done < self.personal / whole if self.first == "personal" else done >= self.shared / whole

    def least_steps(self) -> int:
        """The fewest local steps of a visit in which both sides move."""
        return next(steps for steps in count(2) if len({self.is_personal(k / steps) for k in range(steps)}) == 2)


def chosen(turn: Tensor, new: Any, old: Any) -> Any:
    """The state `new` where it is the side's turn, (), and else `old`."""
    return pytree.tree_map(lambda a, b: torch.where(turn, a, b), new, old)

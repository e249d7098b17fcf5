"""Records what a call does with tensors, and does it again, as a CUDA graph does but on the processor.

A replay calls torch's operations on the same tensors, with the numbers that were passed when it was recorded. Python
code of the call does not run again. So whatever a step takes from anywhere else than its tensors shows as a difference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class Tape(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any]] = []  # (operation, arguments, results); they keep every tensor alive

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, (args, kwargs or {}), result))
        return result

    @torch.no_grad()
    def replay(self) -> None:
        values: dict[int, Tensor] = {}
        for func, given, recorded in self.calls:
            args, kwargs = pytree.tree_map(lambda leaf: values.get(id(leaf), leaf), given)
            for old, new in zip(*map(pytree.tree_leaves, (recorded, func(*args, **kwargs))), strict=True):
                if isinstance(old, Tensor):
                    values[id(old)] = new


def record_on_tape(call: Callable[[], None]) -> Callable[[], None]:
    with Tape() as tape:
        call()
    assert tape.calls
    return tape.replay


@dataclass(frozen=True)
class Parts:
    """A visit of three functions, see `recorded_visit.Visit`."""

    begin: Callable[[Any], Any]
    step: Callable[[Any, Any], Any]
    finish: Callable[[Any, Any], Any]
    form: str = ""

"""Finds, without a device, what would make the processor wait for one inside local training.

Tensors of the device "meta" have shapes and no values. Whatever needs a value of one of them (`.item()`, `bool(…)`,
`.cpu()`, `nonzero`, a boolean index) raises an exception there, as does an operation on tensors of two devices. Copies
from the processor to "meta" do not, though copies from unpinned memory to a CUDA device make the processor wait.
`NoCopies` raises an exception for them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

META = torch.device("meta")


class Waits(Exception):
    """The processor would have to wait for the device."""


class NoCopies(TorchDispatchMode):
    """While it lasts, no operation may have a tensor of the processor among its inputs and one of the device as its
    result, or the other way round. Numbers () of the processor may be operands, as they are arguments of a kernel.
    `calls`: the number of operations on the device."""

    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        got = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        self.calls += any(leaf.device == META for leaf in got)
        copies = "copy" in func.__name__
        for one, other in ((given, got), (got, given)):
            for leaf in one:
                if leaf.device.type == "cpu" and (leaf.ndim or copies) and any(o.device == META for o in other):
                    raise Waits(f"{func} takes {tuple(leaf.shape)} between the processor and the device")
        return result


def on_meta(state: Any) -> Any:
    """The state with its tensors on the device "meta"."""
    return pytree.tree_map(lambda leaf: leaf.to(META) if isinstance(leaf, Tensor) else leaf, state)

"""Functions of torch that kernels replace, and which of their arguments the compiled kernels can take."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_batchedtensor, is_gradtrackingtensor  # pyright: ignore[reportMissingImports]
from torch.overrides import TorchFunctionMode


class Replacements(TorchFunctionMode):
    """A context in which some functions of torch are computed by others with the same arguments. own: function -> what
    takes its place, and returns None where torch has to compute the result."""

    def __init__(self, own: Mapping[Any, Callable[..., Any]]) -> None:
        super().__init__()
        self.own = own

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        own = self.own.get(func)
        result = own(*args, **(kwargs or {})) if own is not None else None
        return func(*args, **(kwargs or {})) if result is None else result


def supported(*tensors: Tensor | None) -> bool:
    """Whether the compiled kernels can read the tensors: float32 on the CPU, not inside torch.func.grad."""
    given = [tensor for tensor in tensors if tensor is not None]
    return all(t.dtype == torch.float32 and t.device.type == "cpu" and not is_gradtrackingtensor(t) for t in given)


def supported_alone(*tensors: Tensor | None) -> bool:
    """Whether the tensors are `supported`, and not those of several clients of a block."""
    return supported(*tensors) and not any(is_batchedtensor(tensor) for tensor in tensors if tensor is not None)


def scalar_of(value: Any) -> Any:
    """The number that all entries of a pair have, None if they differ. A number stands for itself."""
    if isinstance(value, tuple | list) and len(set(value)) == 1:
        return value[0]
    return value if isinstance(value, int) else None


def padding_of(stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1) -> int | None:
    """The padding on every side of a convolution with these arguments, which follow its bias. None if the sides differ,
    if the padding is named, or if the convolution has a stride, a dilation or groups."""
    plain = scalar_of(stride) == scalar_of(dilation) == groups == 1
    return scalar_of(padding) if plain else None

"""Whether results agree."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


def equal(a: Any, b: Any) -> bool:
    """Whether two values have the same type, shape and bits. NaN equals NaN."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.shape == b.shape and a.dtype == b.dtype and same_bits(a, b)
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, tuple | list):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    return a is b or (type(a) is type(b) and (a == b or repr(a) == repr(b)))


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of the same shape and dtype have equal entries, where NaN equals NaN."""
    return torch.equal(a, b) or (a.is_floating_point() and torch.equal(a.nan_to_num(0.5), b.nan_to_num(0.5)))

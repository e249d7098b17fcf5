"""The global random generators of a process."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from ..kernels.agreement import equal


def generators() -> dict[str, Any]:
    """The states of the global generators of torch, NumPy and Python, by their names in error messages."""
    return {
        "torch's global generator": torch.get_rng_state(),
        "NumPy's global generator": np.random.get_state(),
        "Python's module random": random.getstate(),
    }


def moved(before: dict[str, Any]) -> str:
    """The name of a generator whose state differs from that in `before` (as `generators` returned it), or ""."""
    now = generators()
    return next((name for name, state in before.items() if not equal(state, now[name])), "")


@contextmanager
def kept_generators() -> Iterator[None]:
    """A context at whose end the global generators have the states again that they had at its beginning."""
    torch_state, numpy_state, python_state = generators().values()
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)
        np.random.set_state(numpy_state)
        random.setstate(python_state)

"""Functions of torch.autograd with a gradient of their own, which cannot be differentiated again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def first_derivatives_only(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Mark the static method `backward` of a torch.autograd.Function whose result must not be differentiated again.

    It raises RuntimeError where a gradient is computed so that it can be differentiated (`create_graph=True`).
    torch's own mark for this, `once_differentiable`, raises an error later, in the second derivative, and only if
    autograd gets there: with `allow_unused=True` and `materialize_grads=True` it gives zeros instead.
    """

    @functools.wraps(backward)
    def first(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "second derivatives are asked for, which only torch's own kernels have; choose engine.kernels=torch"
            )
        return backward(ctx, *grads)

    return first

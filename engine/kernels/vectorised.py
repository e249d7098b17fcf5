"""torch's vmap, without its warnings about operations that it computes for one client after the other."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch._C._functorch import (  # pyright: ignore[reportMissingImports]
    _set_vmap_fallback_warning_enabled,  # pyright: ignore[reportAttributeAccessIssue]
)
from torch.func import vmap

LOG = logging.getLogger("fedfleet.vmap")


def vectorised(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function for all clients at once, the first axis of every tensor of its arguments and its result.

    torch computes operations without a rule for vmap one client after the other, and asks to file an issue with it in
    each call. That changes no number, and whether it is slow is measured where blocks are planned. The Python logger
    "fedfleet.vmap" has these lines at the level of debugging.
    """
    at_once = vmap(function)

    def call(*given: Any) -> Any:
        with logged() if LOG.isEnabledFor(logging.DEBUG) else unsaid():
            return at_once(*given)

    return call


@contextmanager
def unsaid() -> Iterator[None]:
    """A context in which torch does not warn about such operations."""
    _set_vmap_fallback_warning_enabled(False)
    try:
        yield
    finally:
        _set_vmap_fallback_warning_enabled(True)


@contextmanager
def logged() -> Iterator[None]:
    """A context in which all warnings are lines of the log."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for each in caught:
        LOG.debug("%s", each.message)

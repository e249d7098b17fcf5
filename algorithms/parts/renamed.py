"""Arguments whose names have changed: the old name is refused with a message that gives the new one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

Made = TypeVar("Made")


def renamed(**names: str) -> Callable[[Callable[..., Made]], Callable[..., Made]]:
    """Decorate a recipe with old argument names, old = "new". Calling it with an old name raises ValueError. The
    decorated recipe has the table as its attribute `renamed`, so that arguments can be checked before a call."""

    def around(recipe: Callable[..., Made]) -> Callable[..., Made]:
        @functools.wraps(recipe)
        def checked(*args: Any, **kwargs: Any) -> Made:
            for old, new in names.items():
                if old in kwargs:
                    raise ValueError(said(old, new, kwargs[old]))
            return recipe(*args, **kwargs)

        vars(checked)["renamed"] = names
        return checked

    return around


def said(old: str, new: str, value: Any) -> str:
    """The message for an old name."""
    return f"{old} is called {new} now, got {old}={value!r}; write {new}"

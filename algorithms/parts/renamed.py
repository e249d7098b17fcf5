"""Arguments whose names have changed: the old name is refused with a sentence that says the new one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

Made = TypeVar("Made")


def renamed(**names: str) -> Callable[[Callable[..., Made]], Callable[..., Made]]:
    """A decorator of a recipe, old name = new name. Calling the recipe with an old name raises ValueError; the recipe's
    attribute `renamed` has the table, for those who look at arguments before they call."""

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
    return f"{old} is called {new} now, got {old}={value!r}; write {new}"

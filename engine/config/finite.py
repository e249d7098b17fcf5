"""Settings that are infinite or no number are refused, wherever an experiment gives them."""

from __future__ import annotations

import math
import typing
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any

from ..errors import ConfigError

MARK = "may be infinite"
"""In an annotation, Annotated[float, "may be infinite"]: infinity has a meaning there, as for a threshold."""


def unbounded(hint: Any) -> bool:
    """Whether an annotation, or one of a union's, has the mark."""
    return any(MARK in getattr(option, "__metadata__", ()) for option in (hint, *typing.get_args(hint)))


def check_finite(value: Any, path: str, unbounded: bool = False) -> None:
    """Raise ConfigError where a setting is NaN, or infinite and not `unbounded`.

    value: a number, a sequence or a mapping of settings, or a part that is already built, whose fields are looked at.
    """
    if isinstance(value, float):
        if math.isnan(value) or (math.isinf(value) and not unbounded):
            raise ConfigError(f"{path} must be a finite number, got {value}; give a number")
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            check_finite(inner, f"{path}.{key}", unbounded)
    elif isinstance(value, list | tuple):
        for place, inner in enumerate(value):
            check_finite(inner, f"{path}[{place}]", unbounded)
    elif is_dataclass(value) and not isinstance(value, type):
        check_fields(value, path)


def check_fields(part: Any, path: str) -> None:
    """The fields of a built part that are not as its class has them by default."""
    try:
        hints = typing.get_type_hints(type(part), include_extras=True)
    except (NameError, TypeError):  # a class of a user's, defined inside a function
        hints = {}
    for field in fields(part):
        value = getattr(part, field.name, None)
        if field.init and not by_default(field, value):
            check_finite(value, f"{path}.{field.name}", unbounded(hints.get(field.name)))


def by_default(field: Field[Any], value: Any) -> bool:
    return isinstance(value, float) and field.default is not MISSING and value == field.default

"""Settings that are infinite or not a number are refused, wherever an experiment gives them."""

from __future__ import annotations

import math
import typing
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any

from ..errors import ConfigError

MARK = "may be infinite"
"""A mark in annotations, Annotated[float, "may be infinite"], for settings such as thresholds that may be infinite."""


def may_be_infinite(hint: Any) -> bool:
    """Whether an annotation, or a member of a union, has the mark."""
    return any(MARK in getattr(option, "__metadata__", ()) for option in (hint, *typing.get_args(hint)))


def check_finite(value: Any, path: str, infinite: bool = False) -> None:
    """Raise ConfigError if a setting is NaN, or if it is infinite and `infinite` is false.

    `value`: a number, a sequence or mapping of settings, or a part that is already built, whose fields are checked.
    `path`: the key that the message names.
    """
    if isinstance(value, float):
        if math.isnan(value) or (math.isinf(value) and not infinite):
            raise ConfigError(f"{path} must be a finite number, got {value}; give a number")
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            check_finite(inner, f"{path}.{key}", infinite)
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            check_finite(inner, f"{path}[{number}]", infinite)
    elif is_dataclass(value) and not isinstance(value, type):
        check_fields(value, path)


def check_fields(part: Any, path: str) -> None:
    """Check the fields of a built part whose values are not the defaults of its class."""
    try:
        hints = typing.get_type_hints(type(part), include_extras=True)
    except (NameError, TypeError):  # a user's class that is defined inside a function
        hints = {}
    for field in fields(part):
        value = getattr(part, field.name, None)
        if field.init and not is_default(field, value):
            check_finite(value, f"{path}.{field.name}", may_be_infinite(hints.get(field.name)))


def is_default(field: Field[Any], value: Any) -> bool:
    """Whether the value of a field is a float that equals the field's default."""
    return isinstance(value, float) and field.default is not MISSING and value == field.default

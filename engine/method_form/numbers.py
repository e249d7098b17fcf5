"""The numbers of a method as data: step sizes, momenta and the like, apart from everything else that it is made of.

Two methods of the same form differ only in numbers. One of them stands for both if its numbers are tensors, with one
value for each client, under `torch.func.vmap`.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

Path = tuple[str | int, ...]
"""Names of fields, and positions in tuples, from the method to the number."""

NUMBER_FIELD = re.compile(r"\b(float|Number)\b")
"""The annotations of fields that hold numbers. A whole number in such a field is a number; in any other field it is a
part of the form, such as a number of iterations."""


def is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def numbers(method: Any) -> dict[Path, float]:
    """All numbers of a method, or of any part."""
    found: dict[Path, float] = {}
    _walk(method, (), False, found)
    return found


def form(part: Any) -> Hashable:
    """What two parts must have in common to differ only in their numbers; it can be compared and hashed."""
    return _walk(part, (), False, {})


def identity(part: Any, without: Sequence[str] = ()) -> Hashable:
    """The form of a part and its numbers, which two parts have in common that do the same. without: names of fields of
    the part that do not count."""
    found: dict[Path, float] = {}
    return _walk(part, (), False, found, without), tuple(found.items())


def _walk(value: Any, path: Path, number: bool, found: dict[Path, float], without: Sequence[str] = ()) -> Hashable:
    """The form of a value, whose numbers are added to `found`. number: whether a whole number counts as a number."""
    if isinstance(value, float) or (number and is_whole(value)):
        found[path] = float(value)
        return "number"
    if is_dataclass(value) and not isinstance(value, type):
        parts = [
            (field.name, _walk(getattr(value, field.name), (*path, field.name), _has_numbers(field), found))
            for field in fields(value)
            if field.name not in without
        ]
        return (type(value), *parts)
    if isinstance(value, tuple):
        return (type(value), *(_walk(inner, (*path, i), number, found) for i, inner in enumerate(value)))
    try:
        hash(value)
    except TypeError:
        return (type(value), id(value))
    return (type(value), value)


def _has_numbers(field: Any) -> bool:
    return bool(NUMBER_FIELD.search(field.type if isinstance(field.type, str) else str(field.type)))


def with_numbers(part: Any, values: Mapping[Path, Any], path: Path = ()) -> Any:
    """A copy of a method, or of a part of it, with other values instead of some of its numbers.

    The constructor is not called, because its checks compare numbers, which a tensor under vmap does not allow.
    """
    if path in values:
        return values[path]
    if not any(other[: len(path)] == path for other in values):
        return part
    if isinstance(part, tuple):
        inner = [with_numbers(each, values, (*path, i)) for i, each in enumerate(part)]
        return type(part)(*inner) if hasattr(part, "_fields") else tuple(inner)
    copy = object.__new__(type(part))
    for field in fields(part):
        value = with_numbers(getattr(part, field.name), values, (*path, field.name))
        object.__setattr__(copy, field.name, value)
    return copy


def differing(methods: Sequence[Mapping[Path, float]]) -> dict[Path, Tensor]:
    """The numbers in which methods (m) of one form differ, as float64 tensors (m,). methods: the `numbers` of each.

    They are float64 because that is what Python computes with: 1 - 0.999 in float32 would be wrong by 10^-5 of itself.
    """
    first, *others = methods
    paths = [path for path, value in first.items() if any(other[path] != value for other in others)]
    return {path: torch.tensor([each[path] for each in methods], dtype=torch.float64) for path in paths}

"""Grids in an experiment: {search: grid, values: [0.1, 0.01]} instead of a number; `choice` means the same.

Other kinds of `search` are ranges, which `fedfleet search` explores.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from itertools import product
from typing import Any

from ...engine.errors import ConfigError

LISTS = ("grid", "choice")


def leaves(data: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """(path, mapping) of every mapping {search: …}."""
    if isinstance(data, dict):
        if "search" in data:
            yield path, data
            return
        for key, inner in data.items():
            yield from leaves(inner, (*path, str(key)))


def has_ranges(data: Any) -> bool:
    """Whether the data contain a range that is no grid."""
    return any(leaf["search"] not in LISTS for _, leaf in leaves(data))


def points(data: dict[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """({dotted key: value}, data with these values) of every point of the grids; only ({}, data) without a grid."""
    found = list(leaves(data))
    for values in product(*(values_of(path, leaf) for path, leaf in found)):
        yield chosen(data, found, values)


def chosen(data: dict[str, Any], found: list[Any], values: tuple[Any, ...]) -> tuple[dict[str, Any], dict[str, Any]]:
    made = deepcopy(data)
    for (path, _), value in zip(found, values, strict=True):
        place = made
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value
    return {".".join(path): value for (path, _), value in zip(found, values, strict=True)}, made


def values_of(path: tuple[str, ...], leaf: dict[str, Any]) -> list[Any]:
    values = leaf.get("values")
    if not isinstance(values, list) or not values:
        raise ConfigError(f"{'.'.join(path)}: a grid needs values, got {leaf!r}; write {{search: grid, values: [0.1]}}")
    return values

"""Ranges in an experiment: a mapping {search: KIND, …} instead of any value.

    {search: uniform, low: 0, high: 1}          a number; step: 0.1 for multiples
    {search: loguniform, low: 1e-4, high: 1}    a number, uniform in its logarithm
    {search: int, low: 1, high: 64}             a whole number; step: 2, or log: true
    {search: choice, values: [sgd, adam]}       one of these values of any type, also mappings
    {search: grid, values: [0.1, 0.01]}         the same; if all ranges are grids, every point is tried once

A range is named by its dotted key, such as method.rule.lr, also in Optuna and MLflow.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..engine.config.yaml_text import own
from ..engine.errors import ConfigError, nearest

KINDS = {
    "uniform": ("low", "high", "step"),
    "loguniform": ("low", "high"),
    "int": ("low", "high", "step", "log"),
    "choice": ("values",),
    "grid": ("values",),
}
OPTIONAL = ("step", "log")


@dataclass(frozen=True)
class Range:
    """One range. `key`: dotted; `kind`: see KINDS; `spec`: its arguments in the file."""

    key: str
    kind: str
    spec: dict[str, Any]

    @property
    def listed(self) -> bool:
        return self.kind in ("choice", "grid")

    @property
    def numeric(self) -> bool:
        return not self.listed

    @cached_property
    def values(self) -> list[Any]:
        """All values of a list, or both ends of a range of numbers."""
        return self.spec["values"] if self.listed else [self.spec["low"], self.spec["high"]]

    @cached_property
    def coded(self) -> dict[Any, Any]:
        """Code in the storage -> value of a list. Values that are neither numbers nor text are coded as JSON."""
        return {code(value): value for value in self.values}

    def check(self, value: Any) -> Any:
        """The code of a value; ConfigError if it lies outside the range."""
        if self.listed:
            if code(value) in self.coded:
                return code(value)
        elif number(value) and self.values[0] <= value <= self.values[1]:
            return value
        raise ConfigError(f"search.start: {self.key} must lie in {self}, got {value!r}")

    def __str__(self) -> str:
        return json.dumps(self.values) if self.listed else f"[{self.values[0]:g}, {self.values[1]:g}]"


def code(value: Any) -> Any:
    """The value as the storage holds it."""
    return value if value is None or isinstance(value, bool | int | float | str) else json.dumps(value, sort_keys=True)


def number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def is_range(data: Any) -> bool:
    return isinstance(data, Mapping) and "search" in data and not isinstance(data["search"], Mapping)


def ranges(data: Mapping[str, Any], path: tuple[str, ...] = ()) -> list[Range]:
    """All ranges in an experiment's plain data, in their order; ConfigError for the first invalid one."""
    found: list[Range] = []
    for key, inner in data.items():
        here = (*path, str(key))
        if is_range(inner):
            found.append(parsed(".".join(here), dict(inner)))
        elif isinstance(inner, Mapping):
            found += ranges(inner, here)
        elif isinstance(inner, list) and any(is_range(item) for item in inner):
            raise ConfigError(
                f"{'.'.join(here)}: a range cannot be an item of a list; search over whole lists by choice"
            )
    return found


def parsed(key: str, spec: dict[str, Any]) -> Range:
    """The range that a mapping describes; ConfigError if it is invalid."""
    kind = spec.pop("search")
    if not isinstance(kind, str) or kind not in KINDS:
        raise ConfigError(f"{key}.search: there is no range {kind}; {nearest(str(kind), KINDS)}")
    for argument in spec:
        if argument not in KINDS[kind]:
            raise ConfigError(f"{key}.{argument} is not an argument of {kind}; {nearest(str(argument), KINDS[kind])}")
    for argument in KINDS[kind]:
        if argument not in spec and argument not in OPTIONAL:
            raise ConfigError(f"{key}: {kind} needs {argument}")
    (check_list if kind in ("choice", "grid") else check_ends)(key, kind, spec)
    return Range(key, kind, spec)


def check_list(key: str, kind: str, spec: dict[str, Any]) -> None:
    values = spec["values"]
    if not isinstance(values, list) or not values:
        raise ConfigError(f"{key}: {kind} needs a list of values, got {values!r}; write values: [0.1, 0.01]")
    if any(is_range(value) or (isinstance(value, Mapping) and ranges(value)) for value in values):
        raise ConfigError(f"{key}: a value of {kind} cannot contain a range; run two searches instead")
    if len({json.dumps(value, sort_keys=True) for value in values}) < len(values):
        raise ConfigError(f"{key}: {kind} has a value twice, got {values!r}; remove one")


def check_ends(key: str, kind: str, spec: dict[str, Any]) -> None:
    wanted = int if kind == "int" else (int, float)
    for name in ("low", "high", "step"):
        value = spec.get(name)
        if name in spec and not (number(value) and isinstance(value, wanted)):
            what = "whole number" if kind == "int" else "number"
            raise ConfigError(f"{key}.{name} must be a {what}, got {value!r}")
    if not isinstance(spec.get("log", False), bool):
        raise ConfigError(f"{key}.log must be true or false, got {spec['log']!r}")
    if not spec["low"] < spec["high"]:
        raise ConfigError(f"{key}: low < high must hold, got low={spec['low']:g}, high={spec['high']:g}")
    if spec.get("step", 1) <= 0:
        raise ConfigError(f"{key}.step > 0 must hold, got {spec['step']:g}")
    logarithmic = kind == "loguniform" or spec.get("log", False)
    if logarithmic and spec["low"] <= 0:
        raise ConfigError(f"{key}: low > 0 must hold for a logarithm, got {spec['low']:g}")
    if logarithmic and "step" in spec:
        raise ConfigError(f"{key}: step and log exclude each other; remove one")


def decided(data: dict[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The experiment with values instead of its ranges. values: dotted key -> value."""
    made = own(data)
    for key, value in values.items():
        *outer, last = key.split(".")
        place = made
        for name in outer:
            place = place[name]
        place[last] = own(value)
    return made


def points(found: list[Range]) -> Iterator[dict[str, Any]]:
    """All combinations of the lists' values; the last list changes fastest."""
    for values in itertools.product(*(r.values for r in found)):
        yield {r.key: value for r, value in zip(found, values, strict=True)}


def corners(found: list[Range]) -> Iterator[dict[str, Any]]:
    """Two points: the first values of all ranges, and the last ones."""
    yield {r.key: r.values[0] for r in found}
    yield {r.key: r.values[-1] for r in found}

"""Hyperparameters that change from round to round. They are resolved to numbers before a round begins.

Wherever a method takes a number, an experiment may give a schedule, {schedule: cosine, start: 0.1, end: 0.001}. Methods
see only numbers. A mapping with a name is not a schedule but a part with arguments, one of which may be called
`schedule`. In round t of R:

    constant      start
    cosine        end + (start - end) (1 + cos(pi (t - 1) / R)) / 2
    exponential   start decay^(t - 1)
    polynomial    start t^power          (TailOPT's step sizes and thresholds)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import ConfigError, nearest


def constant(t: int, rounds: int, start: float) -> float:
    return start


def cosine(t: int, rounds: int, start: float, end: float = 0.0) -> float:
    return end + (start - end) * (1 + math.cos(math.pi * (t - 1) / rounds)) / 2


def exponential(t: int, rounds: int, start: float, decay: float) -> float:
    return start * decay ** (t - 1)


def polynomial(t: int, rounds: int, start: float, power: float = 0.0) -> float:
    return start * t**power


SCHEDULES: dict[str, Callable[..., float]] = {
    "constant": constant,
    "cosine": cosine,
    "exponential": exponential,
    "polynomial": polynomial,
}


def is_schedule(spec: Any) -> bool:
    """Whether a value is a schedule, and not a part that has an argument called `schedule`."""
    return isinstance(spec, Mapping) and "schedule" in spec and "name" not in spec


def has_schedule(spec: Any) -> bool:
    """Whether a specification is a schedule or contains one."""
    return is_schedule(spec) or (isinstance(spec, Mapping) and any(has_schedule(v) for v in spec.values()))


def resolve(spec: Any, t: int, rounds: int, path: str) -> Any:
    """The specification with every schedule replaced by its number in round t (1 … `rounds`).

    `path`: the key of the specification, which messages name.
    """
    if not isinstance(spec, Mapping):
        return spec
    if not is_schedule(spec):
        return {key: resolve(value, t, rounds, f"{path}.{key}") for key, value in spec.items()}
    name = spec["schedule"]
    if name not in SCHEDULES:
        raise ConfigError(f"{path}.schedule: no schedule is called {name}; {nearest(str(name), SCHEDULES)}")
    try:
        return SCHEDULES[name](t, rounds, **{k: float(v) for k, v in spec.items() if k != "schedule"})
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ConfigError(f"{path}: schedule {name}: {error}") from None

"""Checks of a method's arguments: each raises ValueError with one sentence that names the argument and its value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .groups import Number, both


def positive(**values: Number) -> None:
    """Check that numbers such as step sizes are above 0, in every group of parameters."""
    for name, value in values.items():
        if not all(part > 0 for part in both(value)):
            raise ValueError(f"{name} > 0 must hold, got {name}={value}")


def nonnegative(**values: float) -> None:
    """Check that numbers such as weight decays are at least 0."""
    for name, value in values.items():
        if not value >= 0:
            raise ValueError(f"{name} >= 0 must hold, got {name}={value}")


def fraction(**values: float) -> None:
    """Check that numbers such as the momentum, the weight of the old value, lie in [0, 1)."""
    for name, value in values.items():
        if not 0 <= value < 1:
            raise ValueError(f"0 <= {name} < 1 must hold, got {name}={value}")


def positive_fraction(**values: Number) -> None:
    """Check that numbers such as the weight of the new gradient lie in (0, 1], in every group of parameters."""
    for name, value in values.items():
        if not all(0 < part <= 1 for part in both(value)):
            raise ValueError(f"0 < {name} <= 1 must hold, got {name}={value}")


def closed_fraction(**values: Number) -> None:
    """Check that numbers lie in [0, 1], in every group of parameters."""
    for name, value in values.items():
        if not all(0 <= part <= 1 for part in both(value)):
            raise ValueError(f"0 <= {name} <= 1 must hold, got {name}={value}")


def one_of(*allowed: str, **values: str) -> None:
    """Check that each value is one of the allowed names."""
    for name, value in values.items():
        if value not in allowed:
            choices = " or ".join(allowed) if len(allowed) == 2 else f"one of {', '.join(allowed)}"
            raise ValueError(f"{name} must be {choices}, got {value!r}")


def refuse(given: Mapping[str, Any], why: str, remedy: str) -> None:
    """Refuse arguments that would have no effect. `given`: name -> value, None where the argument was left out."""
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"{name} has no effect here, got {name}={value!r}: {why}; {remedy}")

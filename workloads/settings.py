"""Checks of the settings of workloads, which their constructors call."""

from __future__ import annotations

from math import inf


def check_finite_from(settings: object, **least: float) -> None:
    """Raise ValueError unless each named attribute is finite and at least as large as the number given for it."""
    for name, low in least.items():
        value = getattr(settings, name)
        if not low <= value < inf:
            raise ValueError(f"{low} <= {name} < infinity must hold, got {name}={value}")

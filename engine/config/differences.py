"""Which settings two configurations differ in, where it matters for resuming."""

from __future__ import annotations

from typing import Any

from .schedules import has_schedule

FREE = (
    "engine.backend",
    "engine.workers",
    "engine.cpus",
    "engine.gpus",
    "engine.address",
    "engine.patience",
    "engine.placement",
    "engine.wait",
)
FREE_SECTIONS = ("name", "tracking.", "checkpoint.", "evaluate.", "engine.on_failure", "engine.keep_state", "plugins")
"""May change from one part of a run to the next: they move no bit of the model."""


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """["method.rule.lr was 0.1, is 0.2", …]; more rounds are no difference unless a schedule depends on them."""
    a, b = flat(old), flat(new)
    found = []
    for key in sorted(a.keys() | b.keys()):
        if a.get(key) == b.get(key) or key in FREE or key.startswith(FREE_SECTIONS):
            continue
        if key == "federation.rounds" and not has_schedule(old) and not has_schedule(new):
            continue
        found.append(f"{key} was {a.get(key, 'not set')}, is {b.get(key, 'not set')}")
    return found


def flat(data: Any, prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}."""
    if not isinstance(data, dict):
        return {prefix[:-1]: list(data) if isinstance(data, tuple) else data}
    return {key: value for name, inner in data.items() for key, value in flat(inner, f"{prefix}{name}.").items()}

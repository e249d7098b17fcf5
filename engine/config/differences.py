"""The settings in which two configurations differ, as far as they matter for resuming a run."""

from __future__ import annotations

from typing import Any

from .schedules import has_schedule

FREE_KEYS = (
    "engine.backend",
    "engine.workers",
    "engine.cpus",
    "engine.gpus",
    "engine.address",
    "engine.patience",
    "engine.placement",
    "engine.port",  # of earlier versions
    "engine.wait",
    "engine.pending",
)
FREE_SECTIONS = ("name", "tracking.", "checkpoint.", "evaluate.", "engine.on_failure", "engine.keep_state", "plugins")
"""Settings that may change when a run is resumed, since they change no bit of the model."""
NOT_FREE = ("evaluate.held_out",)
"""Settings of free sections that may not change: rows that are held out are not trained on."""
DEFAULTS = {
    "aggregate": "mean",
    "attack": None,
    "evaluate.held_out": 0.0,
    "federation.sampling": "fixed",
    "federation.sampler": "uniform",
    "federation.mean": "auto",
    "federation.without": [],
    "federation.pace.name": "rounds",
    "federation.pace.select": 1.0,
    "federation.pace.stragglers": "wait",
    "federation.pace.least": 1,
    "federation.pace.notice": "once",
}
"""Settings that a configuration may lack, and the values that they then have."""


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """The differences as ["method.rule.lr was 0.1, is 0.2", …].

    A different number of rounds counts only if a schedule depends on it.
    """
    a, b = {**DEFAULTS, **flatten(old)}, {**DEFAULTS, **flatten(new)}
    found = []
    for key in sorted(a.keys() | b.keys()):
        free = key in FREE_KEYS or (key.startswith(FREE_SECTIONS) and key not in NOT_FREE)
        if free or a.get(key) == b.get(key):
            continue
        if key == "federation.rounds" and not has_schedule(old) and not has_schedule(new):
            continue
        found.append(f"{key} was {a.get(key, 'not set')}, is {b.get(key, 'not set')}")
    return found


def flatten(data: Any, prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}."""
    if not isinstance(data, dict):
        return {prefix[:-1]: list(data) if isinstance(data, tuple) else data}
    return {key: value for name, inner in data.items() for key, value in flatten(inner, f"{prefix}{name}.").items()}

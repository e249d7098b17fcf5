"""The settings in which two configurations differ: those that may not when a run is resumed, and those that a fork must
not change."""

from __future__ import annotations

from typing import Any

from ..errors import ConfigError
from .schedules import has_schedule

FREE_KEYS = (
    "engine.backend",
    "engine.workers",
    "engine.cpus",
    "engine.gpus",
    "engine.address",
    "engine.patience",
    "engine.placement",
    "engine.wait",
    "engine.pending",
)
FREE_SECTIONS = ("name", "tracking.", "checkpoint.", "evaluate.", "engine.on_failure", "engine.keep_state", "plugins")
"""Settings that may change when a run is resumed, since they change no bit of the model."""
NOT_FREE = ("evaluate.held_out", "evaluate.validation")
"""Settings of free sections that may not change: these rows are not trained on."""
DEFAULTS = {
    "aggregate": "mean",
    "attack": None,
    "evaluate.held_out": 0.0,
    "evaluate.validation": 0.0,
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


# --- forks ------------------------------------------------------------------------------------------------------------
POPULATION = "the clients' data and all draws follow from it"
PLAN = "a fork keeps the execution plan of its parent, so that only the changes make a difference"
STATES = "the states of the parent have another type"
CLOCK = "the virtual clock begins in round 1"
TIMELINE = "the timeline of an asynchronous run follows from it from the first dispatch on"
OWN = "clients keep rows of another form with other tensors"
ACCOUNT = "epsilon is accounted for the same sampling and noise in all rounds"

REFUSED = {
    "seed": POPULATION,
    "federation.clients": POPULATION,
    "evaluate.held_out": POPULATION,
    "evaluate.validation": POPULATION,
    "engine.dtype": STATES,
    "engine.state_dtype": STATES,
    "engine.block": PLAN,
    "engine.kernels": PLAN,
    "engine.vectorise": PLAN,
    "engine.device": PLAN,
    "engine.threads": PLAN,
    "engine.precision": PLAN,
    "privacy": ACCOUNT,
    "personal.tensors": OWN,
    "personal.frozen": OWN,
    "personal.carry": OWN,
}
"""Settings, or whole sections, that a fork must not change, and why."""

TIMED = (
    *("systems", "federation.cohort", "federation.local", "federation.pace.name", "federation.pace.base"),
    *("federation.pace.buffer", "federation.pace.staleness", "federation.pace.open", "federation.pace.once"),
    *("federation.pace.deadline", "federation.pace.ties", "federation.pace.starts", "federation.pace.gap"),
)
"""Settings that the timeline of an asynchronous run follows from."""


def fork_changes(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """The differences of a fork from its parent, as `differences` gives them. old, new: the configurations.

    Raises ConfigError with one sentence for each setting that a fork must not change.
    """
    a, b = {**DEFAULTS, **flatten(old)}, {**DEFAULTS, **flatten(new)}
    asynchronous = a.get("federation.pace.name") != "rounds"
    wrong = []
    for key in sorted(a.keys() | b.keys()):
        if a.get(key) != b.get(key) and (why := refusal(key, asynchronous, "privacy" in old or "privacy" in new)):
            values = f"the parent has {a.get(key, 'none')}, got {b.get(key, 'none')}"
            wrong.append(f"{key} must stay as it is in a fork: {why}; {values}; undo this, or start a new run")
    if ("systems" in old) != ("systems" in new):
        wrong.append(f"systems must stay as it is in a fork: {CLOCK}; undo this, or start a new run")
    elif asynchronous != (b.get("federation.pace.name") != "rounds"):
        wrong = [f"federation.pace.name must stay as it is in a fork: {CLOCK}; undo this, or start a new run"]
    if wrong:
        raise ConfigError("; ".join(wrong))
    rounds = [f"federation.rounds was {a[key]}, is {b[key]}" for key in ["federation.rounds"] if a[key] != b[key]]
    return list(dict.fromkeys([*differences(old, new), *rounds]))


def refusal(key: str, asynchronous: bool, private: bool) -> str:
    """Why a fork must not change a setting, "" if it may."""
    for name, why in REFUSED.items():
        if key == name or key.startswith(f"{name}."):
            return why
    if private and key.startswith(("federation.cohort", "federation.sampler")):
        return ACCOUNT
    if asynchronous and any(key == name or key.startswith(f"{name}.") for name in TIMED):
        return TIMELINE
    return ""

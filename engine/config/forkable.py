"""The settings that a fork may change, and why it must not change the others."""

from __future__ import annotations

from typing import Any

from ..errors import ConfigError
from .differences import DEFAULTS, differences, flatten

POPULATION = "the clients' data and all draws follow from it"
PLAN = "a fork keeps the execution plan of its parent, so that only the changes make a difference"
STATES = "the states of the parent have another type"
CLOCK = "the virtual clock begins in round 1"
TIMELINE = "the timeline of an asynchronous run follows from it from the first dispatch on"
ACCOUNT = "epsilon is accounted for the same sampling and noise in all rounds"

REFUSED = {
    "seed": POPULATION,
    "federation.clients": POPULATION,
    "federation.sampling": POPULATION,
    "federation.separation": POPULATION,
    "evaluate.held_out": POPULATION,
    "engine.dtype": STATES,
    "engine.state_dtype": STATES,
    "engine.block": PLAN,
    "engine.kernels": PLAN,
    "engine.vectorise": PLAN,
    "engine.device": PLAN,
    "engine.threads": PLAN,
    "engine.precision": PLAN,
    "privacy": ACCOUNT,
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
    if private and key == "federation.cohort":
        return ACCOUNT
    if asynchronous and any(key == name or key.startswith(f"{name}.") for name in TIMED):
        return TIMELINE
    return ""

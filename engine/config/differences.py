"""The settings in which two configurations differ: those that may not when a run is resumed, and those that a fork must
not change."""

from __future__ import annotations

from functools import reduce
from typing import Any

from ..errors import ConfigError
from .schedules import has_schedule, is_over_steps, is_schedule, numbers_in_round, schedules_of

FREE_KEYS = (
    "engine.backend",
    "engine.workers",
    "engine.cpus",
    "engine.gpus",
    "engine.address",
    "engine.patience",
    "engine.state_memory",
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
    "federation.local.accumulate": 1,
    "federation.mean": "auto",
    "federation.without": [],
    "federation.unseen": None,
    "federation.pace.name": "rounds",
    "federation.pace.select": 1.0,
    "federation.pace.stragglers": "wait",
    "federation.pace.least": 1,
    "federation.pace.notice": "once",
}
"""Settings that a configuration may lack, and the values that they then have."""


def differences(old: dict[str, Any], new: dict[str, Any], made: int | None = None) -> list[str]:
    """The differences as ["method.rule.lr was 0.1, is 0.2", …].

    made: the number of rounds that a run which is resumed has made. Another number of rounds, and another schedule, do
    not count then if these rounds would have been the same. Without it they count if there is a schedule.
    """
    a, b = {**DEFAULTS, **flatten(old)}, {**DEFAULTS, **flatten(new)}
    both = () if made is None else (old, new)
    scheduled = list(dict.fromkeys(path for data in both for path, _ in schedules_of(data)))
    below, found = tuple(f"{'.'.join(path)}." for path in scheduled), []
    for key in sorted(a.keys() | b.keys()):
        free = key in FREE_KEYS or (key.startswith(FREE_SECTIONS) and key not in NOT_FREE)
        if free or a.get(key) == b.get(key) or f"{key}.".startswith(below):
            continue
        if key == "federation.rounds" and (made is not None or not (has_schedule(old) or has_schedule(new))):
            continue
        found.append(f"{key} was {a.get(key, 'not set')}, is {b.get(key, 'not set')}")
    return found + [line for path in scheduled if (line := scheduled_otherwise(path, old, new, made or 0))]


def scheduled_otherwise(path: tuple[str, ...], old: dict[str, Any], new: dict[str, Any], made: int) -> str:
    """The difference of two configurations where one of them has a schedule, "" if the first `made` rounds have the
    same numbers."""
    was, now = reduce(value_of, path, old), reduce(value_of, path, new)
    before, rounds = old["federation"]["rounds"], new["federation"]["rounds"]
    if was == now and (before == rounds or "length" in was):
        return ""
    key, steps = ".".join(path), new["federation"]["local"].get("steps") or 1
    if is_number(was) and is_number(now):
        same = all(
            numbers_in_round(was, number, before, steps, key) == numbers_in_round(now, number, rounds, steps, key)
            for number in range(1, made + 1)
        )
        if same:
            return ""
    if was != now:
        return f"{key} was {'not set' if was is None else was}, is {'not set' if now is None else now}"
    length = before * steps if is_over_steps(was) else before
    return (
        f"{key} goes over all rounds, and would have had other numbers in the {made} rounds that were made if "
        f"federation.rounds had been {rounds} instead of {before} (with {key}.length={length} they stay, and the last "
        "one goes on)"
    )


def value_of(data: Any, key: str) -> Any:
    if isinstance(data, list):
        return data[int(key)] if key.isdecimal() and int(key) < len(data) else None
    return data.get(key) if isinstance(data, dict) else None


def is_number(value: Any) -> bool:
    """Whether a value is a number, or a schedule of one."""
    return is_schedule(value) or (isinstance(value, int | float) and not isinstance(value, bool))


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
    "federation.unseen": POPULATION,
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
    "engine.base": "frozen tensors stay what they were",
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

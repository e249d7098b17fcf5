"""Labels of runs: the method and the settings in which the runs differ."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ...engine.config.schema import Federation
from ...engine.errors import ConfigError
from ...engine.records.lineage import lineage_of
from ..identity import effective_settings
from .part_defaults import with_defaults


def numeric_settings(data: dict[str, Any]) -> dict[str, Any]:
    """The settings that influence a run's numbers, without the seed, by dotted key."""
    for part in ("workload", "method"):
        if isinstance(data.get(part), str):
            data[part] = {"name": data[part]}
    if isinstance(data.get("federation"), dict) and isinstance(data["federation"].get("pace"), dict):
        data["federation"] = {**data["federation"], "pace": chosen_pace(data["federation"]["pace"])}
    return {key: value for key, value in effective_settings(data).items() if key != "seed"}


def chosen_pace(pace: dict[str, Any]) -> dict[str, Any]:
    """The keys of `federation.pace` whose values are not the defaults of its name, since paces of different names have
    different keys."""
    name = pace.get("name", "rounds")
    try:
        defaults = Federation(pace={"name": name}).pace.model_dump()  # pyright: ignore[reportArgumentType]
    except ConfigError:  # of another version
        return pace
    changed = {key: value for key, value in pace.items() if value != defaults.get(key)}
    return changed if name == "rounds" else {"name": name, **changed}


def settings_of(data: dict[str, Any], folder: Path | None) -> dict[str, Any]:
    """`numeric_settings` of the run in a folder, and the round from which it was forked, if it is a fork."""
    lineage = lineage_of(folder)
    return {**numeric_settings(data), **({"fork.round": lineage.round} if lineage else {})}


def labels_of(configurations: list[dict[str, Any]]) -> list[str]:
    """A label for each run: the method's name and the values of all keys in which the runs differ.

    A run that leaves an argument out is labelled by the argument's default.
    """
    written = {key for data in configurations for key in data}
    configurations = with_defaults([named(data, written) for data in configurations])
    keys = sorted({key for data in configurations for key in data})
    differ = [key for key in keys if len({as_text(data.get(key)) for data in configurations}) > 1]
    return [label_of(data, [key for key in differ if key != "method.name"]) for data in configurations]


def named(data: dict[str, Any], keys: set[str]) -> dict[str, Any]:
    """The settings in which parts that are given by a name alone are written like those with arguments: {"method.rule":
    "sgd"} -> {"method.rule.name": "sgd"}, if some run has this key."""
    return {f"{k}.name" if isinstance(v, str) and f"{k}.name" in keys else k: v for k, v in data.items()}


def as_text(value: Any) -> str:
    """A setting as text, the same for a list of a file and a tuple of an object."""
    return json.dumps(value, default=str)


def label_of(data: dict[str, Any], differ: list[str]) -> str:
    differing = [f"{key_in_label(key)} {data[key]}" for key in differ if key in data]
    return ", ".join([str(data.get("method.name", "method")), *differing])


def key_in_label(key: str) -> str:
    """A key as labels have it."""
    return key.removeprefix("method.").replace("federation.pace.", "pace.").replace("pace.name", "pace")

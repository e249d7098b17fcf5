"""Labels of runs: the method and the settings in which the runs differ. An argument that a configuration leaves out has
its default there."""

from __future__ import annotations

import inspect
import json
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from ...engine.config.registry import Registry, resolve, signature
from ...engine.config.schema import Experiment, Federation
from ...engine.errors import ConfigError
from ...engine.records.lineage import lineage_of
from ..identity import effective_settings
from ..units import setting

PARTS = {"method": "METHODS", "workload": "WORKLOADS"}
"""Section of a configuration -> the table of the registry in which its name is."""

UNSET = {"aggregate": "mean", "attack": "none", "privacy": "none", "systems": "none"}
"""Sections that a configuration may lack -> what it then has, in a word."""

UNKNOWN = "default"
"""The value of an argument whose default cannot be looked up, since its part is from a plug-in."""


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
    short = {key: shortened([data[key] for data in configurations if key in data]) for key in differ}
    short.pop("method.name", None)
    whole = [label_of(data, short) for data in configurations]
    said = {key: text for key, text in short.items() if not is_default(key, configurations)}
    brief = [label_of(data, said) for data in configurations]
    return brief if len(set(brief)) == len(set(whole)) else whole


def is_default(key: str, configurations: list[dict[str, Any]]) -> bool:
    """Whether the configurations that have a key all have its default in the schema, as those have in which a section
    such as `personal` is given beside others without it."""
    default = as_text(default_in_schema(key))
    return all(as_text(data[key]) == default for data in configurations if key in data)


def default_in_schema(key: str) -> Any:
    """The default of a dotted key of an experiment; Parameter.empty if the schema has no such key, or no default."""
    section: type[BaseModel] | None = Experiment
    found: Any = inspect.Parameter.empty
    for part in key.split("."):
        if section is None or (field := section.model_fields.get(part)) is None:
            return inspect.Parameter.empty
        found = inspect.Parameter.empty if field.is_required() else field.get_default(call_default_factory=True)
        options = (field.annotation, *typing.get_args(field.annotation))
        section = next((one for one in options if inspect.isclass(one) and issubclass(one, BaseModel)), None)
    return found


def shortened(values: list[Any]) -> Callable[[Any], str]:
    """How the values of a key are written in labels: as everywhere, unless two different ones would look alike."""
    alike = len(set(map(setting, values))) < len(set(map(as_text, values)))
    return str if alike else setting


def named(data: dict[str, Any], keys: set[str]) -> dict[str, Any]:
    """The settings in which parts that are given by a name alone are written like those with arguments: {"method.rule":
    "sgd"} -> {"method.rule.name": "sgd"}, if some run has this key."""
    return {f"{k}.name" if isinstance(v, str) and f"{k}.name" in keys else k: v for k, v in data.items()}


def as_text(value: Any) -> str:
    """A setting as text, the same for a list of a file and a tuple of an object."""
    return json.dumps(value, default=str)


def label_of(data: dict[str, Any], differ: Mapping[str, Callable[[Any], str]]) -> str:
    """differ: key in which runs differ -> how its values are written."""
    differing = [f"{key_in_label(key)} {text(data[key])}" for key, text in differ.items() if key in data]
    return ", ".join([str(data.get("method.name", "method")), *differing])


def key_in_label(key: str) -> str:
    """A key as labels have it."""
    return key.removeprefix("method.").replace("federation.pace.", "pace.").replace("pace.name", "pace")


# --- defaults --------------------------------------------------------------------------------------------------------
def with_defaults(configurations: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The configurations, each with the values of the keys that it lacks and that another one has.

    configurations: value by dotted key. A key that is an argument of another part, such as the `mu` of FedProx beside
    SCAFFOLD, stays away. Plug-ins are not loaded: the defaults of their parts are UNKNOWN.
    """
    return [completed(data, [other for other in configurations if other is not data]) for data in configurations]


def completed(data: dict[str, Any], others: list[dict[str, Any]]) -> dict[str, Any]:
    """A configuration with the values of the keys that only others have."""
    found = dict(data)
    for key in sorted({key for other in others for key in other}):
        section = key.partition(".")[0]
        if key not in data and section in UNSET and not any(k.partition(".")[0] == section for k in data):
            found[section] = UNSET[section]
        elif key not in data and section in PARTS:
            value = argument(data, key, Registry().tables)
            name = f"{section}.name"
            alike = any(key in other and other.get(name) == data.get(name) for other in others)
            if value is not inspect.Parameter.empty and (value != UNKNOWN or alike):
                found[key] = value
    return found


def argument(data: Mapping[str, Any], key: str, tables: Mapping[str, Mapping[str, Any]]) -> Any:
    """The default of the argument that a dotted key names; Parameter.empty if the configuration's part has none."""
    path, *inner = key.split(".")
    table = PARTS[path]
    while inner:
        name = data.get(f"{path}.name", data.get(path))
        if name is None:
            return inspect.Parameter.empty
        if name not in tables[table]:
            return UNKNOWN
        try:
            hints, parameters = signature(resolve(tables[table][name]))
        except Exception as error:  # importing the module that an entry names may raise anything
            raise ConfigError(f"{path}.name: {name} cannot be built: {error}") from error
        wanted, *inner = inner
        if wanted not in parameters:
            return inspect.Parameter.empty
        path = f"{path}.{wanted}"
        inner_table = table_of(hints.get(wanted))
        if not any(k == path or k.startswith(f"{path}.") for k in data):
            return within(parameters[wanted].default, inner, tables.get(inner_table, {}))
        table = inner_table
        if not table:
            return inspect.Parameter.empty
    return inspect.Parameter.empty


def table_of(hint: Any) -> str:
    """The table of the parts that an annotation allows, "" if it names none."""
    options = (hint, *typing.get_args(hint))
    return next((str(option.table) for option in options if hasattr(option, "table")), "")


def within(value: Any, path: list[str], entries: Mapping[str, Any]) -> Any:
    """An attribute of a default that is a part itself, such as the step size of a rule; `name` is its name among the
    entries of its table."""
    for attribute in path:
        if attribute == "name":
            return next((name for name, entry in entries.items() if resolve(entry) is type(value)), UNKNOWN)
        value = getattr(value, attribute, inspect.Parameter.empty)
    return value

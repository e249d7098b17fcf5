"""The defaults of the arguments that a configuration leaves out, for the labels of comparisons."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Mapping
from typing import Any

from ...engine.config.registry import Registry, resolve, signature
from ...engine.errors import ConfigError

PARTS = {"method": "METHODS", "workload": "WORKLOADS"}
"""Section of a configuration -> the table of the registry in which its name is."""

UNSET = {"aggregate": "mean", "attack": "none", "privacy": "none", "systems": "none"}
"""Sections that a configuration may lack -> what it then has, in a word."""

UNKNOWN = "default"
"""The value of an argument whose default cannot be looked up, since its part is from a plug-in."""


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

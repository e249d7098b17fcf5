"""Tables of what can be chosen by name. Listing the project's own entries does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from textwrap import wrap
from typing import Any

from ..engine.config.registry import Registry, find_plugin, resolve, summary
from ..engine.errors import ConfigError, nearest
from ..engine.user_code import plugin_errors
from .files import shipped as shipped_experiments
from .study.spec import shipped as shipped_studies

KINDS = {
    "methods": "METHODS",
    "workloads": "WORKLOADS",
    "models": "MODELS",
    "adapters": "ADAPTERS",
    "partitions": "PARTITIONS",
    "rules": "RULES",
    "balls": "BALLS",
    "compressions": "COMPRESSIONS",
    "codecs": "CODECS",
    "aggregators": "AGGREGATORS",
    "preaggregators": "PREAGGREGATORS",
    "samplers": "SAMPLERS",
    "devices": "DEVICES",
    "distributions": "DISTRIBUTIONS",
    "availabilities": "AVAILABILITIES",
    "work": "LOCAL_WORK",
    "attacks": "ATTACKS",
    "mechanisms": "MECHANISMS",
    "kernels": "KERNELS",
    "experiments": "",
    "studies": "",
}
"""Kind of what can be chosen -> its table in the registry, "" for files."""

COSTS = ("paper", "state", "down", "up", "gradients")
UNKNOWN = "–"
WIDTH = 100
"""Characters of a line of prose."""
HEADS = ("name", "what it is", "paper", "state/client", "down", "up", "gradients/step")


def listing(kind: str, plugins: tuple[str, ...] = ()) -> str:
    """The entries of a kind, see KINDS. plugins: to load as well."""
    if kind in ("experiments", "studies"):
        shipped = shipped_experiments if kind == "experiments" else shipped_studies
        return columns([("name", "first line"), *((n, headline(p.read_text())) for n, p in shipped().items())])
    entries = Registry(find_plugin(name) for name in plugins).tables[KINDS[kind]]
    if kind == "methods":
        rows = [(n, summary(e), *costs(n, e, plugins)) for n, e in entries.items()]
        note = "state, down and up are counted in trees of the model's size, per client and round"
        if any(UNKNOWN in row for row in rows):
            note += f"; {UNKNOWN}: a plug-in does not say it"
        return columns([HEADS, *rows]) + "\n" + note
    return columns([("name", "what it is"), *((n, summary(e)) for n, e in entries.items())])


def details(kind: str, name: str, plugins: tuple[str, ...] = ()) -> str:
    """What an entry of a kind is, and its arguments. Raises ConfigError for a name that is not there."""
    table, tables = KINDS[kind], Registry(find_plugin(plugin) for plugin in plugins).tables
    if not table:
        raise ConfigError(f"list {kind}: files have no arguments, got {name}; `fedfleet show` prints an experiment")
    if name not in tables[table]:
        raise ConfigError(f"list {kind}: there is no {name}; {nearest(name, tables[table])}")
    with plugin_errors(f"list {kind} {name}"):
        told = [f"{name}: {summary(tables[table][name])}", *choice(kind, tables[table][name])]
        return "\n".join([*told, "", arguments(table, name, tables)])


def choice(kind: str, entry: Any) -> list[str]:
    """When to choose a method, in the lines of a narrow screen; [] for other parts, and where nothing says it."""
    from .arguments import plain, when_to_choose  # it loads torch

    return wrap(plain(when_to_choose(resolve(entry))), WIDTH) if kind == "methods" else []


def arguments(table: str, name: str, tables: Mapping[str, Mapping[str, Any]]) -> str:
    """The arguments of an entry of a table of the registry, with their types, defaults and meanings."""
    from .arguments import arguments_of, plain  # it loads torch

    rows = [
        (each.name, plain(each.type), "required" if each.required else each.default, plain(each.meaning))
        for each in arguments_of(table, name, tables)
    ]
    return columns([("argument", "type", "default", "meaning"), *rows]) if rows else "no arguments"


def costs(name: str, entry: Any, plugins: tuple[str, ...]) -> tuple[str, ...]:
    """The columns COSTS of a method. Those that the entry of a plug-in does not have are counted for the model of
    handwritten digits, or are UNKNOWN."""
    said = {column: str(getattr(entry, column, UNKNOWN)) for column in COSTS}
    if UNKNOWN in said.values():
        from .method_costs import trees  # it loads torch

        counted = trees(name, plugins)
        said = {column: text if text != UNKNOWN else counted.get(column, UNKNOWN) for column, text in said.items()}
    return tuple(said.values())


def headline(text: str) -> str:
    """The first line of a file, without the comment sign."""
    return text.split("\n")[0].lstrip("# ")


def columns(rows: list[tuple[str, ...]]) -> str:
    """The rows as lines of text with aligned columns."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)

"""Types of configuration keys and of arguments, in words."""

from __future__ import annotations

import types
import typing
from typing import Any

from fedfleet.algorithms.parts.groups import PerGroup
from fedfleet.engine.config.schema import AsIf, Asynchronous, Pace, Privacy, Systems, WorkerGroup

NAMES = {
    int: "integer",
    float: "number",
    bool: "`true` or `false`",
    str: "text",
    Any: "name or mapping",
    PerGroup: "number for each group",
    WorkerGroup: "group",
    Privacy: "mapping",
    AsIf: "mapping",
    Systems: "mapping",
    Pace: "mapping",
    Asynchronous: "mapping",
}


def in_words(annotation: Any) -> str:
    """A type such as "integer or `auto`". None is left out: a default of None shows as an empty cell."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return in_words(arguments[0])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(in_words(a) for a in arguments if a is not types.NoneType))
    if origin is typing.Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin is tuple:
        count = "" if arguments[-1] is ... else f"{len(arguments)} "
        return f"list of {count}{plural(in_words(arguments[0]))}"
    if origin is list:
        return f"list of {plural(in_words(arguments[0]))}"
    if origin is dict:
        return f"mapping of names to {plural(in_words(arguments[1]))}"
    if isinstance(annotation, type) and hasattr(annotation, "table"):
        return annotation.__name__.lower()
    return NAMES[annotation]


def plural(noun: str) -> str:
    """The plural of a type in words."""
    if "`" in noun or noun.endswith("s"):
        return noun
    return {"name or mapping": "values", "mapping of names to values": "mappings"}.get(noun, f"{noun}s")

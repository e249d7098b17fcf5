"""The pages of the methods: from the table, the recipes and the heads of their files."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from fedfleet.engine.config.registry import Registry, resolve, summary
from fedfleet.tune.arguments import CHOOSE, arguments_of, when_to_choose

from . import equations, measured
from .text import sentence, table

HEAD = """\
# Methods

This page is generated from the table of methods and from their files. A method is chosen by its name,
`method: {name: scaffold, start: gradient}`; wherever an argument is a number, a
[schedule](../../howto/experiments.md#schedules) may stand for it. The first tables say when to choose which method, as
their papers argue or their equations imply; [costs](#costs) and [a measurement](#measured-on-fashionmnist) of many of
them follow.
"""

COSTS_HEAD = """\
## Costs

**State**, **down** and **up** count trees of the size of the model, per client and round: multiplied by the bytes of a
model, they are what a client keeps between rounds, receives and sends with the default arguments. "ratio" is an
argument of the method, and "places" are packed indices of entries. **Gradients** are counted per local step.
"""

NOTATION = """\
`x` is the model of the server, `y` the local iterate, `K` the number of local steps, `S` the clients of a round among
`N`, and `g` the gradient on the batch of the step. A quantity with index `i` belongs to client i. Names of several
letters are arguments of the method.
"""


def families() -> dict[str, list[str]]:
    """Title -> the methods of a family, in the order of the table."""
    found: dict[str, list[str]] = {}
    for name, entry in Registry().tables["METHODS"].items():
        found.setdefault(entry.family, []).append(name)
    return found


def index() -> str:
    """The page that lists all methods: by family, and with their costs."""
    methods = Registry().tables["METHODS"]
    parts = [HEAD]
    for family, names in families().items():
        told = {name: (summary(methods[name]), when(name).removeprefix(CHOOSE)) for name in names}
        rows = [(link(name), *map(sentence, texts)) for name, texts in told.items()]
        parts += [f"## {family}\n", table(("method", "what it is", "choose it …"), rows)]
    costs = [(link(name), e.paper, e.state, e.down, e.up, e.gradients) for name, e in methods.items()]
    head = ("method", "paper", "state", "down", "up", "gradients")
    return "\n".join([*parts, COSTS_HEAD, table(head, costs), measured.section(methods)])


def link(name: str) -> str:
    return f"[`{name}`]({name}.md)"


def when(name: str) -> str:
    """When to choose a method, as Markdown."""
    return prose(when_to_choose(resolve(Registry().tables["METHODS"][name])))


def page(name: str) -> str:
    """The page of one method. Its head also says what the method is, so that the site's search finds it."""
    tables = Registry().tables
    entry = tables["METHODS"][name]
    module = inspect.getmodule(resolve(entry))
    paragraphs = (inspect.getdoc(module) or "").split("\n\n")
    parts = [
        f"---\ntitle: {name}\n---\n",
        f"# `{name}`: {summary(entry)} {{ #{name} }}\n\n{paragraphs[0]}\n",
        f"{citation(module)}\n\n{when(name)}\n",
        f"## Equations\n\n{NOTATION}\n" + equations_of(paragraphs) + shared_equations(paragraphs[1]),
        f"## Arguments\n\n{arguments(name, tables)}",
        "## Costs\n\n"
        + table(("state", "down", "up", "gradients per step"), [(entry.state, entry.down, entry.up, entry.gradients)])
        + f"\n{COSTS}",
        measured.of_one_method(name),
        f"## Notes and departures from the paper\n\n{notes(paragraphs)}",
        f"The code is in `{file_of(module)}`.\n",
    ]
    return "\n".join(part for part in parts if part)


COSTS = "Trees of the size of the model, per client and round; see [the list of methods](index.md).\n"


def file_of(module: Any) -> str:
    return "/".join(module.__name__.split(".")[1:]) + ".py"


def equations_of(paragraphs: Sequence[str]) -> str:
    """The indented paragraphs of a file's head as displays, each with the paragraph that introduces it."""
    parts = []
    for before, paragraph in pairwise(paragraphs):
        if paragraph.startswith("    "):
            introduced = before.endswith((":", ",")) and not before.startswith("    ")
            parts += [prose(before), ""] if introduced else []
            parts += [equations.display(paragraph), ""]
    return "\n".join(parts)


def shared_equations(citation: str) -> str:
    """The equations of the part that the second paragraph of a file's head refers to, as `parts/….py`; or nothing."""
    shared = re.search(r"`parts/(\w+)\.py`", citation)
    if not shared:
        return ""
    module = importlib.import_module(f"fedfleet.algorithms.parts.{shared[1]}")
    return equations_of((inspect.getdoc(module) or "").split("\n\n"))


def notes(paragraphs: Sequence[str]) -> str:
    """The paragraphs of a file's head after the citation that are neither equations nor their introductions, nor
    say when to choose the method."""
    kept = []
    for paragraph, following in pairwise([*paragraphs[2:], ""]):
        introduces = following.startswith("    ") and paragraph.endswith((":", ","))
        if not paragraph.startswith(("    ", CHOOSE)) and not introduces:
            kept += [prose(paragraph), ""]
    return "\n".join(kept)


def prose(paragraph: str) -> str:
    """A paragraph of a docstring as Markdown: stars and angle brackets stand for themselves, lists stay lists."""
    pieces = re.split(r"(`[^`]*`)", paragraph)
    escaped = "".join(p if p.startswith("`") else re.sub(r"([*<_])", r"\\\1", p) for p in pieces)
    return re.sub(r"^([^\n:]+:)\n- ", r"\1\n\n- ", escaped)


def arguments(name: str, tables: Mapping[str, Mapping[str, Any]]) -> str:
    """The table of a method's arguments."""
    rows = [
        (f"`{each.name}`", each.type, f"`{each.default}`" if each.default else "", sentence(each.meaning))
        for each in arguments_of("METHODS", name, tables)
    ]
    return table(("argument", "type", "default", "meaning"), rows)


def citation(module: Any) -> str:
    """The second paragraph of a method's file."""
    paragraphs = (inspect.getdoc(module) or "").split("\n\n")
    return " ".join(paragraphs[1].split()) if len(paragraphs) > 1 else ""
